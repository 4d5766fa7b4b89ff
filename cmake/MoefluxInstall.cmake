# Installs the static library, the public headers, the command with its demo model, and what other build
# systems need to find them: find_package(moeflux) and pkg-config. Dependencies are derived from the
# libraries the modules link.
include(CMakePackageConfigHelpers)

get_property(libs GLOBAL PROPERTY MOEFLUX_LINK_LIBS)
set(MOEFLUX_CONFIG_DEPENDENCIES "")  # lines of moefluxConfig.cmake
set(MOEFLUX_PC_REQUIRES "")          # names of pkg-config packages
set(MOEFLUX_PC_LIBS "")
set(needs_pkgconfig FALSE)
foreach(lib ${libs})
  if(lib STREQUAL "Threads::Threads")
    string(APPEND MOEFLUX_CONFIG_DEPENDENCIES "find_dependency(Threads)\n")
    string(APPEND MOEFLUX_PC_LIBS " -pthread")
  elseif(lib MATCHES "^PkgConfig::(.+)$")
    set(prefix ${CMAKE_MATCH_1})
    set(package ${${prefix}_MODULE_NAME})
    set(needs_pkgconfig TRUE)
    string(APPEND MOEFLUX_CONFIG_DEPENDENCIES "moeflux_find_pkg(${prefix} ${package})\n")
    list(APPEND MOEFLUX_PC_REQUIRES ${package})
  elseif(lib MATCHES "^(fmt|simdjson)::")
    string(APPEND MOEFLUX_CONFIG_DEPENDENCIES "find_dependency(${CMAKE_MATCH_1})\n")
    list(APPEND MOEFLUX_PC_REQUIRES ${CMAKE_MATCH_1})
  elseif(lib MATCHES "cudart_static")
    string(APPEND MOEFLUX_PC_LIBS " ${lib}")  # a file of the toolkit, in the exported target too
  else()
    message(FATAL_ERROR "cmake/MoefluxInstall.cmake does not know how a consumer finds ${lib}: add it there")
  endif()
endforeach()
list(JOIN MOEFLUX_PC_REQUIRES " " MOEFLUX_PC_REQUIRES)
if(needs_pkgconfig)
  string(PREPEND MOEFLUX_CONFIG_DEPENDENCIES "find_dependency(PkgConfig)\n")
endif()

install(TARGETS moeflux EXPORT moefluxTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/moeflux DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(DIRECTORY models/demo/ DESTINATION ${CMAKE_INSTALL_DATADIR}/moeflux/demo)
if(TARGET moeflux_cli)
  install(TARGETS moeflux_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moeflux)
install(EXPORT moefluxTargets NAMESPACE moeflux:: DESTINATION ${config_dir})
configure_package_config_file(cmake/moefluxConfig.cmake.in ${CMAKE_BINARY_DIR}/package/moefluxConfig.cmake
  INSTALL_DESTINATION ${config_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/package/moefluxConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/package/moefluxConfig.cmake ${CMAKE_BINARY_DIR}/package/moefluxConfigVersion.cmake
  DESTINATION ${config_dir})

# Relative to the .pc file, so that the installed tree can be moved.
file(RELATIVE_PATH MOEFLUX_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" MOEFLUX_PC_PREFIX "${MOEFLUX_PC_PREFIX}")
configure_file(cmake/moeflux.pc.in ${CMAKE_BINARY_DIR}/package/moeflux.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/package/moeflux.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
