# Third-party libraries, all from Debian (scripts/setup); none of them shows in include/.
find_package(Threads REQUIRED)

include(Fp4moeStatic)

find_package(nlohmann_json 3.11 REQUIRED)
fp4moe_find_static(fp4moe_dep_pcre2 pcre2.h pcre2-8)
fp4moe_find_static(fp4moe_dep_utf8proc utf8proc.h utf8proc)

if(FP4MOE_CUDA)
  fp4moe_find_cuda_toolkit()
endif()
if(FP4MOE_SERVER)
  find_package(Boost 1.81 REQUIRED)  # Beast and Asio are header-only
endif()
if(FP4MOE_TOOLS)
  find_package(CLI11 REQUIRED)
  find_package(fmt REQUIRED)
endif()
if(FP4MOE_TESTS)
  find_package(GTest REQUIRED)
  find_package(rapidcheck REQUIRED)
endif()

# The fabric mpi is a plug-in: without MPI it is not built. Its C interface only.
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI COMPONENTS CXX)
