# Functions that find libraries, used by both the build and the installed package.
#
# fp4moe_find_static(TARGET header library): defines an imported target for a C library, static if possible.
function(fp4moe_find_static target header library)
  find_path(${target}_INCLUDE ${header} REQUIRED)
  find_library(${target}_LIBRARY NAMES lib${library}.a ${library} REQUIRED)
  add_library(${target} UNKNOWN IMPORTED GLOBAL)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION "${${target}_LIBRARY}"
                                             INTERFACE_INCLUDE_DIRECTORIES "${${target}_INCLUDE}")
endfunction()

# fp4moe_add_xgrammar(archive include_folder...): defines the target fp4moe_dep_xgrammar. Consumers do not
# need the headers.
function(fp4moe_add_xgrammar archive)
  add_library(fp4moe_dep_xgrammar STATIC IMPORTED GLOBAL)
  set_target_properties(fp4moe_dep_xgrammar PROPERTIES IMPORTED_LOCATION "${archive}"
                                                       INTERFACE_INCLUDE_DIRECTORIES "${ARGN}")
endfunction()

# Calls find_package(CUDAToolkit). CMake 3.25's module fails on toolkits without libnvToolsExt (13.0 and
# newer) unless that target already exists.
macro(fp4moe_find_cuda_toolkit)
  if(NOT TARGET CUDA::nvToolsExt)
    add_library(CUDA::nvToolsExt INTERFACE IMPORTED)
  endif()
  find_package(CUDAToolkit 12.4 REQUIRED)
endmacro()
