# Third-party libraries: Debian packages, except xgrammar (scripts/setup). include/ exposes none of them.
find_package(Threads REQUIRED)

include(Fp4moeStatic)

find_package(nlohmann_json 3.11 REQUIRED)
fp4moe_find_static(fp4moe_dep_pcre2 pcre2.h pcre2-8)
fp4moe_find_static(fp4moe_dep_sodium sodium.h sodium)
fp4moe_find_static(fp4moe_dep_utf8proc utf8proc.h utf8proc)

# For structured output; scripts/setup builds it. Without it, requests for structured output are refused.
set(FP4MOE_XGRAMMAR_ROOT "${PROJECT_SOURCE_DIR}/build/xgrammar" CACHE PATH "Folder with include/ and lib/ of xgrammar; may be missing")
set(FP4MOE_XGRAMMAR OFF)
if(EXISTS "${FP4MOE_XGRAMMAR_ROOT}/stamp")
  set(FP4MOE_XGRAMMAR ON)
  fp4moe_add_xgrammar("${FP4MOE_XGRAMMAR_ROOT}/lib/libxgrammar.a" "${FP4MOE_XGRAMMAR_ROOT}/include")
else()
  message(STATUS "xgrammar: not found in ${FP4MOE_XGRAMMAR_ROOT}; structured output will be refused")
endif()

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

# The mpi fabric is a plug-in that is built only if MPI is found. It uses only MPI's C interface.
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI COMPONENTS CXX)
