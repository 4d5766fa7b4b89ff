# The one-way house. A module is a folder of src/ built as one object library whose include path
# holds the public API, its own headers and those of its declared dependencies, nothing else: an
# include against the direction does not compile.
#
#   moeflux_module(<name> [FOLDER <folder below src>] SOURCES <files..> [CUDA <files.cu..>] [DEPS <modules..>] [LIBS <targets..>])
#   moeflux_library(<name>)   after all modules
#   moeflux_test(<name> SOURCES <files..> MODULES <modules..> [LIBS <targets..>] [LABELS <labels..>] [OPTIMIZED])
#
# Headers are included as "folder/file.h". The include root of a module is a folder of links to its
# headers in the build tree, so that "core/error.h" resolves only where core was declared.
include_guard(GLOBAL)

set(MOEFLUX_INCLUDE_ROOT ${CMAKE_BINARY_DIR}/inc)

add_library(moeflux_flags INTERFACE)
target_compile_options(moeflux_flags INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Werror -Wno-psabi
  -ffp-contract=off -fno-math-errno)
if(MOEFLUX_SANITIZE)
  target_compile_options(moeflux_flags INTERFACE -fsanitize=${MOEFLUX_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(moeflux_flags INTERFACE -fsanitize=${MOEFLUX_SANITIZE})
endif()

# True when a folder on the way from `folder` to the file `relative` has a CMakeLists.txt of its own.
function(moeflux_is_foreign out folder relative)
  set(${out} FALSE PARENT_SCOPE)
  get_filename_component(dir ${relative} DIRECTORY)
  while(dir)
    if(EXISTS ${folder}/${dir}/CMakeLists.txt)
      set(${out} TRUE PARENT_SCOPE)
    endif()
    get_filename_component(dir ${dir} DIRECTORY)
  endwhile()
endfunction()

function(moeflux_module name)
  cmake_parse_arguments(M "" "FOLDER" "SOURCES;CUDA;DEPS;LIBS" ${ARGN})
  if(NOT M_FOLDER)
    set(M_FOLDER ${name})
  endif()
  # One link per header. Subfolders belong to the module, unless they have a CMakeLists.txt: then they are
  # modules of their own and stay invisible.
  set(root ${MOEFLUX_INCLUDE_ROOT}/${name})
  set(folder ${CMAKE_SOURCE_DIR}/src/${M_FOLDER})
  file(GLOB_RECURSE found CONFIGURE_DEPENDS RELATIVE ${folder} ${folder}/*.h ${folder}/*.inl)
  set(headers "")
  set(links "")
  foreach(header ${found})
    moeflux_is_foreign(foreign ${folder} ${header})
    if(NOT foreign)
      list(APPEND headers ${folder}/${header})
      list(APPEND links ${header})
      if(NOT EXISTS ${root}/${M_FOLDER}/${header})
        get_filename_component(parent ${root}/${M_FOLDER}/${header} DIRECTORY)
        file(MAKE_DIRECTORY ${parent})
        file(CREATE_LINK ${folder}/${header} ${root}/${M_FOLDER}/${header} SYMBOLIC)
      endif()
    endif()
  endforeach()
  file(GLOB_RECURSE stale RELATIVE ${root}/${M_FOLDER} ${root}/${M_FOLDER}/*)
  foreach(link ${stale})
    if(NOT link IN_LIST links)
      file(REMOVE ${root}/${M_FOLDER}/${link})
    endif()
  endforeach()

  add_library(mf_${name} OBJECT ${M_SOURCES} ${headers})
  if(M_CUDA)
    moeflux_cuda_objects(objects MODULES ${name} ${M_DEPS} SOURCES ${M_CUDA})
    target_sources(mf_${name} PRIVATE ${objects})
    set_property(GLOBAL APPEND PROPERTY MOEFLUX_CUDA_OBJECTS ${objects})
    set_property(GLOBAL PROPERTY MOEFLUX_CUDA_OBJECTS_${name} ${objects})
  endif()
  target_include_directories(mf_${name} PRIVATE ${CMAKE_SOURCE_DIR}/include ${root})
  foreach(dep ${M_DEPS})
    target_include_directories(mf_${name} PRIVATE ${MOEFLUX_INCLUDE_ROOT}/${dep})
  endforeach()
  target_link_libraries(mf_${name} PRIVATE moeflux_flags fmt::fmt Threads::Threads ${M_LIBS})
  set_property(GLOBAL APPEND PROPERTY MOEFLUX_MODULES ${name})
  set_property(GLOBAL PROPERTY MOEFLUX_DEPS_${name} ${M_DEPS})
  set_property(GLOBAL PROPERTY MOEFLUX_LIBS_${name} ${M_LIBS})
endfunction()

# The static library: the objects of all modules inside one archive, so that what is installed needs no
# target of ours. Third-party libraries stay link-only requirements (MOEFLUX_LINK_LIBS, also the source of
# the installed package files); nlohmann_json is headers alone and leaves no trace.
function(moeflux_library name)
  get_property(modules GLOBAL PROPERTY MOEFLUX_MODULES)
  set(libs fmt::fmt Threads::Threads)
  add_library(${name} STATIC)
  foreach(m ${modules})
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:mf_${m}>)
    get_property(more GLOBAL PROPERTY MOEFLUX_LIBS_${m})
    list(APPEND libs ${more})
  endforeach()
  get_property(cuda_objects GLOBAL PROPERTY MOEFLUX_CUDA_OBJECTS)
  if(cuda_objects)
    set_source_files_properties(${cuda_objects} PROPERTIES GENERATED TRUE EXTERNAL_OBJECT TRUE)
    target_sources(${name} PRIVATE ${cuda_objects})
    add_dependencies(${name} mf_backend_gpu)
  endif()
  list(REMOVE_DUPLICATES libs)
  list(REMOVE_ITEM libs nlohmann_json::nlohmann_json)
  target_link_libraries(${name} PRIVATE ${libs})
  if(MOEFLUX_SANITIZE)
    target_link_options(${name} INTERFACE $<BUILD_INTERFACE:-fsanitize=${MOEFLUX_SANITIZE}>)
  endif()
  target_compile_features(${name} INTERFACE cxx_std_20)
  target_include_directories(${name} INTERFACE
    $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  set_target_properties(${name} PROPERTIES
    LINKER_LANGUAGE CXX ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
  add_library(moeflux::${name} ALIAS ${name})
  set_property(GLOBAL PROPERTY MOEFLUX_LINK_LIBS ${libs})
endfunction()

# All modules that the given ones need, themselves included.
function(moeflux_closure out)
  set(seen "")
  set(todo ${ARGN})
  while(todo)
    list(POP_FRONT todo m)
    if(NOT m IN_LIST seen)
      list(APPEND seen ${m})
      get_property(deps GLOBAL PROPERTY MOEFLUX_DEPS_${m})
      list(APPEND todo ${deps})
    endif()
  endwhile()
  set(${out} ${seen} PARENT_SCOPE)
endfunction()

function(moeflux_link_modules target)
  moeflux_closure(all ${ARGN})
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/include)
  foreach(m ${all})
    get_property(libs GLOBAL PROPERTY MOEFLUX_LIBS_${m})
    target_link_libraries(${target} PRIVATE mf_${m} ${libs})
    target_include_directories(${target} PRIVATE ${MOEFLUX_INCLUDE_ROOT}/${m})
    get_property(objects GLOBAL PROPERTY MOEFLUX_CUDA_OBJECTS_${m})
    if(objects)  # objects made by others are not among an object library's own
      set_source_files_properties(${objects} PROPERTIES GENERATED TRUE EXTERNAL_OBJECT TRUE)
      target_sources(${target} PRIVATE ${objects})
      add_dependencies(${target} mf_${m})
    endif()
  endforeach()
  target_link_libraries(${target} PRIVATE moeflux_flags fmt::fmt Threads::Threads)
endfunction()

# Test sources are compiled to be built quickly (sanitizers triple the time of an optimized test, and most of
# a test is templates); the modules under test keep their flags. OPTIMIZED is for tests that compute a lot
# themselves.
function(moeflux_test name)
  cmake_parse_arguments(T "OPTIMIZED" "" "SOURCES;MODULES;LIBS;LABELS" ${ARGN})
  add_executable(${name} ${T_SOURCES})
  moeflux_link_modules(${name} ${T_MODULES})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE ${T_LIBS} GTest::gtest GTest::gmock GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE
    MOEFLUX_SOURCE_DIR="${CMAKE_SOURCE_DIR}" MOEFLUX_BINARY_DIR="${CMAKE_BINARY_DIR}")
  if(NOT T_OPTIMIZED AND NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
    if(MOEFLUX_SANITIZE)
      target_compile_options(${name} PRIVATE -O0)
    else()
      target_compile_options(${name} PRIVATE -O1)
    endif()
  endif()
  gtest_discover_tests(${name} TEST_PREFIX "${name}." PROPERTIES LABELS "${T_LABELS}" TIMEOUT 900 DISCOVERY_TIMEOUT 60)
endfunction()
