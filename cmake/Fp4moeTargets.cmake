# Helpers that define the project's targets. Flags are per target and not visible to consumers.
set(CMAKE_CXX_EXTENSIONS OFF)

add_library(fp4moe_flags INTERFACE)
target_compile_features(fp4moe_flags INTERFACE cxx_std_20)
# Omitting fields in a designated initialiser is intended: they take their defaults.
target_compile_options(fp4moe_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor
                                              -Wno-missing-field-initializers
                                              $<$<BOOL:${FP4MOE_WERROR}>:-Werror>)
# g++ 12 falsely reports uninitialised reads and overlapping copies inside std::string.
target_compile_options(fp4moe_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized
                                              -Wno-restrict>)
# Contracting a*b+c into an FMA would make results depend on the compiler's choices.
target_compile_options(fp4moe_flags INTERFACE -ffp-contract=off)
# Makes g++ run its garbage collector less often: 8 % less compile time for up to 0.5 GB more per process.
target_compile_options(fp4moe_flags INTERFACE
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=524288 --param=ggc-min-expand=200>)
# The tests consist of 190 binaries; mold links them in a third of the time.
find_program(FP4MOE_MOLD mold)
mark_as_advanced(FP4MOE_MOLD)
if(FP4MOE_MOLD AND PROJECT_IS_TOP_LEVEL)
  add_link_options(-fuse-ld=mold)
endif()
if(FP4MOE_FUZZ)
  target_compile_options(fp4moe_flags INTERFACE -fsanitize=fuzzer-no-link)
  target_link_options(fp4moe_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# fp4moe_unity(TARGET SOURCES...): with FP4MOE_UNITY, compiles each room (sub-folder) as one translation unit,
# because headers take most of a small file's compile time. Names in anonymous namespaces must be unique in a
# room.
function(fp4moe_unity target)
  if(NOT FP4MOE_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  foreach(source ${ARGN})
    cmake_path(GET source PARENT_PATH room)
    string(MAKE_C_IDENTIFIER "room_${room}" group)
    if(NOT IS_ABSOLUTE "${source}")
      set_source_files_properties("${source}" PROPERTIES UNITY_GROUP ${group})
    endif()
  endforeach()
endfunction()

# fp4moe_optimize(TARGET LEVEL): sets the optimization level of Release builds (default 3). Code that compiles
# slowly and is not performance-critical gets a lower level. g++ 12 falsely reports overflows inside
# std::string at level 1.
function(fp4moe_optimize target level)
  target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O${level}>
                                           $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds -Wno-stringop-overflow>)
endfunction()

# fp4moe_library(FOLDER SOURCES ... LINKS folders... PRIVATE libs... [OPTIMIZE level])
# Defines the static library fp4moe_FOLDER from src/FOLDER. Only targets that link it can include its headers as
# "FOLDER/x.h", so an include against the dependency order does not compile.
function(fp4moe_library folder)
  cmake_parse_arguments(ARG "" "OPTIMIZE" "SOURCES;LINKS;PRIVATE" ${ARGN})
  set(target fp4moe_${folder})
  set(root "${PROJECT_BINARY_DIR}/layers/${folder}")
  file(MAKE_DIRECTORY "${root}")
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/src/${folder}" "${root}/${folder}" SYMBOLIC)
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(fp4moe::${folder} ALIAS ${target})
  target_include_directories(${target} PUBLIC "$<BUILD_INTERFACE:${root}>"
                                              "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>")
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PRIVATE "$<BUILD_INTERFACE:fp4moe_flags>" ${ARG_PRIVATE})
  if(NOT folder STREQUAL kernels)  # its files are compiled with different flags
    fp4moe_unity(${target} ${ARG_SOURCES})
  endif()
  foreach(link ${ARG_LINKS})
    target_link_libraries(${target} PUBLIC fp4moe_${link})
  endforeach()
  if(ARG_OPTIMIZE)
    fp4moe_optimize(${target} ${ARG_OPTIMIZE})
  endif()
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON EXPORT_NAME ${folder})
endfunction()

# fp4moe_test([ROOM/]STEM LINKS folders... [SOURCES ...] [LABELS ...] [ARGS ...])
# Defines the GoogleTest binary STEM from ROOM/STEM.cc (and SOURCES), with one CTest entry, labelled unit by
# default. A test labelled cuda is not built without CUDA, and is skipped, with the reason, on a machine
# without a usable GPU.
function(fp4moe_test path)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINKS;LABELS;ARGS;PRIVATE" ${ARGN})
  cmake_path(GET path FILENAME stem)
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  set(main GTest::gtest_main)
  if("cuda" IN_LIST ARG_LABELS)
    if(NOT FP4MOE_CUDA)
      return()
    endif()
    set(main fp4moe_cuda_test_main)
    set_property(GLOBAL APPEND_STRING PROPERTY FP4MOE_CUDA_TESTS "${stem}\n")
  endif()
  add_executable(${stem} ${path}.cc ${ARG_SOURCES})
  target_link_libraries(${stem} PRIVATE fp4moe_flags fp4moe_test_support ${ARG_PRIVATE} ${main})
  target_precompile_headers(${stem} REUSE_FROM fp4moe_test_headers)
  fp4moe_optimize(${stem} g)
  foreach(link ${ARG_LINKS})
    target_link_libraries(${stem} PRIVATE fp4moe_${link})
  endforeach()
  add_test(NAME ${stem} COMMAND ${stem} ${ARG_ARGS})
  set_tests_properties(${stem} PROPERTIES LABELS "${ARG_LABELS}" SKIP_RETURN_CODE 77)
endfunction()

# fp4moe_fuzz_target(STEM LINKS folders...): defines the libFuzzer binary of STEM.cc; its corpus is
# corpus/STEM.
function(fp4moe_fuzz_target stem)
  cmake_parse_arguments(ARG "" "" "LINKS;PRIVATE" ${ARGN})
  add_executable(${stem} ${stem}.cc)
  target_link_libraries(${stem} PRIVATE fp4moe_flags ${ARG_PRIVATE})
  foreach(link ${ARG_LINKS})
    target_link_libraries(${stem} PRIVATE fp4moe_${link})
  endforeach()
  target_link_options(${stem} PRIVATE -fsanitize=fuzzer)
endfunction()
