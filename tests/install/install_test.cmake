# Installs into WORK/prefix, moves it, and builds and runs the consumer against the moved tree, so that a
# path of the build tree or of the first prefix left in a package file is found out.
function(must)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE out)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nended with ${status}\n${out}")
  endif()
  set(out "${out}" PARENT_SCOPE)
endfunction()

function(must_say command)
  must(${command})
  if(NOT out STREQUAL "invalid model\n")
    message(FATAL_ERROR "${command} said: ${out}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
must(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/moved)
set(prefix ${WORK}/moved)
foreach(file share/moeflux/demo/config.json include/moeflux/error.h ${LIBDIR}/libmoeflux.a)
  if(NOT EXISTS ${prefix}/${file})
    message(FATAL_ERROR "not installed: ${file}")
  endif()
endforeach()

must(${CMAKE_COMMAND} -S ${SOURCE}/consumer -B ${WORK}/consumer -G Ninja
  -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_BUILD_TYPE=Debug)
must(${CMAKE_COMMAND} --build ${WORK}/consumer)
must_say(${WORK}/consumer/consumer)

set(ENV{PKG_CONFIG_PATH} ${prefix}/${LIBDIR}/pkgconfig)
must(pkg-config --cflags --libs moeflux)
separate_arguments(flags UNIX_COMMAND "${out}")
must(${CXX} -std=c++20 ${SOURCE}/consumer/main.cpp ${flags} -o ${WORK}/pkgconfig_consumer)
must_say(${WORK}/pkgconfig_consumer)

if(CLI)
  must(${prefix}/bin/moeflux version)
endif()
