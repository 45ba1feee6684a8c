# install(): the public headers, the libraries behind Engine, the binary, and a package for
# find_package(fp4moe).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# The target that consumers link: include/ and all libraries that implement it.
add_library(fp4moe INTERFACE)
add_library(fp4moe::fp4moe ALIAS fp4moe)
target_link_libraries(fp4moe INTERFACE fp4moe_engine)
if(FP4MOE_SERVER)
  target_link_libraries(fp4moe INTERFACE fp4moe_server)
endif()

if(NOT FP4MOE_INSTALL)
  return()
endif()

set(libraries fp4moe fp4moe_base fp4moe_formats fp4moe_io fp4moe_device fp4moe_kernels fp4moe_comm fp4moe_moe
              fp4moe_model fp4moe_engine)
if(FP4MOE_SERVER)
  list(APPEND libraries fp4moe_server)
endif()
install(TARGETS ${libraries} EXPORT fp4moeTargets INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
if(FP4MOE_XGRAMMAR)
  install(FILES "${FP4MOE_XGRAMMAR_ROOT}/lib/libxgrammar.a" DESTINATION "${CMAKE_INSTALL_LIBDIR}/fp4moe")
endif()
install(DIRECTORY include/fp4moe DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
if(FP4MOE_TOOLS)
  install(TARGETS fp4moe_tool RUNTIME)
  install(DIRECTORY "${PROJECT_BINARY_DIR}/share/" DESTINATION "${CMAKE_INSTALL_DATADIR}")
endif()

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/fp4moe")
install(EXPORT fp4moeTargets NAMESPACE fp4moe:: DESTINATION "${package_dir}")
configure_package_config_file(cmake/fp4moeConfig.cmake.in "${PROJECT_BINARY_DIR}/fp4moeConfig.cmake"
                              INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/fp4moeConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/fp4moeConfig.cmake" "${PROJECT_BINARY_DIR}/fp4moeConfigVersion.cmake"
              cmake/Fp4moeStatic.cmake
        DESTINATION "${package_dir}")
