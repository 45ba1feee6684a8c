# Finds nvcc 12.4 or newer and its toolkit: CMAKE_CUDA_COMPILER or CUDACXX if set, otherwise nvcc on the PATH,
# in /usr/local/cuda, or in build/cuda-toolkit (scripts/setup --cuda). Include it before
# enable_language(CUDA).
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(FP4MOE_NVCC_ON_PATH nvcc)
  mark_as_advanced(FP4MOE_NVCC_ON_PATH)
  set(tried "")
  foreach(nvcc "${FP4MOE_NVCC_ON_PATH}" /usr/local/cuda/bin/nvcc "${PROJECT_SOURCE_DIR}/build/cuda-toolkit/bin/nvcc")
    if(NOT EXISTS "${nvcc}")
      continue()
    endif()
    execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE said)
    string(REGEX MATCH "release ([0-9.]+)," _ "${said}")
    if(CMAKE_MATCH_1 VERSION_GREATER_EQUAL 12.4)
      set(CMAKE_CUDA_COMPILER "${nvcc}" CACHE FILEPATH "CUDA compiler")
      break()
    endif()
    string(APPEND tried " ${nvcc} is ${CMAKE_MATCH_1};")
  endforeach()
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "FP4MOE_CUDA=ON needs nvcc 12.4 or newer:${tried} run scripts/setup --cuda, set "
                        "-DCMAKE_CUDA_COMPILER, or configure with -DFP4MOE_CUDA=OFF")
  endif()
endif()
# Make find_package(CUDAToolkit) use the compiler's own toolkit.
if(CMAKE_CUDA_COMPILER AND NOT CUDAToolkit_ROOT)
  get_filename_component(bin "${CMAKE_CUDA_COMPILER}" DIRECTORY)
  get_filename_component(CUDAToolkit_ROOT "${bin}" DIRECTORY)
endif()
