# The CUDA kernels: decides whether they are built (decide.cmake), and defines
#   diloco_cuda       kernels and registrations; link it into an extension to have them
#   diloco_cuda_kernels  the kernels alone, with the CUDA runtime of their nvcc, in the folder
#                     diloco_cuda. Neither knows torch or Python: DILOCO_KERNELS names that folder to
#                     the builds for others, which then need no nvcc
#   _C_cuda           the extension with CUDA for sm_90 whatever DILOCO_CUDA says, for tests
#   diloco_emulated   the same operators with emulated kernels, for tests
# nvcc is called directly, so that configuring costs nothing where it is not used. Its report of each
# file's registers and spills goes to build/cuda.
include(csrc/cuda/decide.cmake)

# Machine code for what nvcc can of these, and PTX for what comes later.
if(can_compile_cuda)
  set(cuda_archs ${DILOCO_CUDA_ARCHS})
  if(NOT cuda_archs)
    execute_process(COMMAND ${DILOCO_NVCC} --list-gpu-code OUTPUT_VARIABLE known)
    foreach(arch 80 86 89 90 100 120)
      if(known MATCHES "sm_${arch}[^0-9a-z]")
        list(APPEND cuda_archs ${arch})
      endif()
    endforeach()
  endif()
endif()
# A library of the registrations, and of the kernels in the given objects and libraries.
function(add_operators name)
  add_library(${name} OBJECT EXCLUDE_FROM_ALL csrc/operators/cuda.cpp)
  target_include_directories(${name} PRIVATE csrc)
  target_link_libraries(${name} PRIVATE torch_headers)
  target_link_libraries(${name} INTERFACE ${ARGN} rt dl)
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden)
endfunction()

# A library of the kernels, for the given architectures, with its reports in build/cuda/FOLDER. No
# contraction and no flushing: the same bytes as every other implementation.
function(add_kernels name folder)
  # Drivers before 12.4 do not read the smaller form; those of CUDA 13 do.
  set(compress -Xfatbin=-compress-all)
  if(nvcc_version VERSION_GREATER_EQUAL 13)
    set(compress --compress-mode=size)
  endif()
  set(flags -std=c++17 -O3 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true
    -Xptxas -v ${compress} -Xcompiler -fPIC,-fvisibility=hidden -I${CMAKE_CURRENT_SOURCE_DIR}/csrc)
  if(DILOCO_WERROR)
    list(APPEND flags -Werror all-warnings)
  endif()
  list(LENGTH ARGN num_archs)
  if(num_archs GREATER 1)
    list(APPEND flags --threads ${num_archs})
  endif()
  foreach(arch ${ARGN})
    list(APPEND flags -gencode arch=compute_${arch},code=sm_${arch})
  endforeach()
  list(GET ARGN -1 newest)
  list(APPEND flags -gencode arch=compute_${newest},code=compute_${newest})
  set(reports ${CMAKE_CURRENT_SOURCE_DIR}/build/cuda/${folder})
  file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/${name} ${reports})
  set(objects "")
  foreach(file ${kernel_files})
    set(source ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/${file}.cu)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${name}/${file}.o)
    set(report ${reports}/${file}.ptxas)
    add_custom_command(OUTPUT ${object} BYPRODUCTS ${report} DEPENDS ${source} VERBATIM
      COMMAND sh -c "\"$@\" >${report} 2>&1 || { cat ${report}; exit 1; }" nvcc
        ${CMAKE_CXX_COMPILER_LAUNCHER} ${DILOCO_NVCC} ${flags} -MD -MF ${object}.d
        -c ${source} -o ${object}
      DEPFILE ${object}.d COMMENT "Compiling CUDA kernels ${file}.cu for sm_${ARGN}")
    list(APPEND objects ${object})
  endforeach()
  add_custom_target(${name}_kernels DEPENDS ${objects}
    COMMAND ${CMAKE_COMMAND} -E copy ${DILOCO_CUDART} ${CMAKE_CURRENT_BINARY_DIR}/${name})
  add_operators(${name} ${objects} ${DILOCO_CUDART})
  add_dependencies(${name} ${name}_kernels)
endfunction()

if(DILOCO_KERNELS)
  list(TRANSFORM kernel_files REPLACE "(.+)" "${DILOCO_KERNELS}/\\1.o" OUTPUT_VARIABLE objects)
  add_operators(diloco_cuda ${objects} ${DILOCO_KERNELS}/libcudart_static.a)
elseif(can_compile_cuda)
  add_kernels(diloco_cuda all ${cuda_archs})
endif()
if(can_compile_cuda)
  add_kernels(diloco_cuda_90 sm_90 90)
  add_extension(_C_cuda)
  target_link_libraries(_C_cuda PRIVATE diloco_cuda_90)
  set_target_properties(_C_cuda PROPERTIES EXCLUDE_FROM_ALL TRUE OUTPUT_NAME _C
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/build/cuda)
endif()

add_library(diloco_emulated MODULE EXCLUDE_FROM_ALL
  csrc/operators/cuda.cpp tests/cpp/emulated_cuda.cpp)
target_include_directories(diloco_emulated PRIVATE csrc)
target_compile_definitions(diloco_emulated PRIVATE DILOCO_EMULATED)
target_compile_options(diloco_emulated PRIVATE -O1 -ffp-contract=off -fno-math-errno)
target_link_libraries(diloco_emulated PRIVATE torch_headers)
set_target_properties(diloco_emulated PROPERTIES CXX_VISIBILITY_PRESET hidden
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/build/emulated)

# The emulation and the kernels of the smallest file; cuda_tests has all that the tests read.
add_custom_target(cuda_sample DEPENDS diloco_emulated)
add_custom_target(cuda_tests DEPENDS diloco_emulated)
if(can_compile_cuda)
  add_custom_target(cuda_digest DEPENDS ${CMAKE_CURRENT_BINARY_DIR}/diloco_cuda_90/digest.o)
  add_dependencies(cuda_sample cuda_digest)
  add_dependencies(cuda_tests _C_cuda)
endif()
