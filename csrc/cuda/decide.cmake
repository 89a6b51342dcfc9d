# Decides whether the CUDA kernels are built, from DILOCO_CUDA and what is found. DILOCO_KERNELS, a
# folder of compiled kernels, needs nothing else. Takes TORCH_VERSION
# and TORCH_CUDA (torch's CUDA version, or empty); sets
#   DILOCO_HAS_CUDA     whether the extension gets them, and cuda_reason: why, or why not
#   can_compile_cuda    whether they could be built at all
#   kernel_files        the names of their sources
# Also runs alone, as a script: cmake -D TORCH_VERSION=... -P csrc/cuda/decide.cmake

# TOP is where the toolkit lies, also when `nvcc` on PATH is a script that calls another.
find_program(DILOCO_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
set(nvcc_version "")
if(DILOCO_NVCC)
  execute_process(COMMAND ${DILOCO_NVCC} --version OUTPUT_VARIABLE text)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _ "${text}")
  set(nvcc_version "${CMAKE_MATCH_1}")
  execute_process(COMMAND ${DILOCO_NVCC} --dryrun -x cu /dev/null ERROR_VARIABLE text OUTPUT_QUIET)
  string(REGEX MATCH "TOP=([^\n]*)" _ "${text}")
  set(cuda_top "${CMAKE_MATCH_1}")
  find_library(DILOCO_CUDART cudart_static
    HINTS ${cuda_top} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib targets/sbsa-linux/lib
    NO_CMAKE_FIND_ROOT_PATH)
endif()

# Why the kernels cannot be built here; empty if they can.
set(cuda_obstacle "")
if(NOT DILOCO_NVCC)
  set(cuda_obstacle "there is no nvcc")
elseif(nvcc_version VERSION_LESS 12.1)
  set(cuda_obstacle "nvcc ${nvcc_version} is older than 12.1")
elseif(NOT DILOCO_CUDART)
  set(cuda_obstacle "nvcc ${nvcc_version} comes without libcudart_static")
endif()

set(can_compile_cuda TRUE)
if(cuda_obstacle)
  set(can_compile_cuda FALSE)
endif()

set(DILOCO_HAS_CUDA FALSE)
string(TOUPPER "${DILOCO_CUDA}" wanted)
string(REGEX MATCH "^[0-9]+" torch_cuda_major "${TORCH_CUDA}")
string(REGEX MATCH "^[0-9]+" nvcc_major "${nvcc_version}")
set(arch "[0-9]+[af]?")
if(DILOCO_CUDA_ARCHS AND NOT DILOCO_CUDA_ARCHS MATCHES "^${arch}(;${arch})*$")
  message(FATAL_ERROR "DILOCO_CUDA_ARCHS must be like \"80;90\", got \"${DILOCO_CUDA_ARCHS}\"")
endif()
set(kernel_files encode reduce outer_step decode digest sparse)
if(DILOCO_KERNELS AND wanted MATCHES "^(ON|AUTO)$")
  list(TRANSFORM kernel_files APPEND .o OUTPUT_VARIABLE missing)
  list(APPEND missing libcudart_static.a)
  foreach(file ${missing})
    if(EXISTS ${DILOCO_KERNELS}/${file})
      list(REMOVE_ITEM missing ${file})
    endif()
  endforeach()
  if(missing)
    string(JOIN ", " missing ${missing})
    message(FATAL_ERROR
      "DILOCO_KERNELS=${DILOCO_KERNELS} is no folder of compiled kernels: it lacks ${missing}")
  endif()
  set(DILOCO_HAS_CUDA TRUE)
  set(cuda_reason "DILOCO_KERNELS=${DILOCO_KERNELS}")
elseif(wanted STREQUAL "ON")
  if(cuda_obstacle)
    message(FATAL_ERROR "DILOCO_CUDA=ON cannot be satisfied: ${cuda_obstacle}")
  endif()
  set(DILOCO_HAS_CUDA TRUE)
  set(cuda_reason "DILOCO_CUDA=ON, nvcc ${nvcc_version}")
elseif(wanted STREQUAL "OFF")
  set(cuda_reason "DILOCO_CUDA=OFF")
elseif(NOT wanted STREQUAL "AUTO")
  message(FATAL_ERROR "DILOCO_CUDA must be AUTO, ON or OFF, got '${DILOCO_CUDA}'")
elseif(cuda_obstacle)
  set(cuda_reason "${cuda_obstacle}")
elseif(NOT TORCH_CUDA)
  set(cuda_reason "torch ${TORCH_VERSION} is built without CUDA")
elseif(NOT torch_cuda_major STREQUAL nvcc_major)
  set(cuda_reason "nvcc ${nvcc_version} does not fit torch's CUDA ${TORCH_CUDA}")
else()
  set(DILOCO_HAS_CUDA TRUE)
  set(cuda_reason "nvcc ${nvcc_version}, torch's CUDA ${TORCH_CUDA}")
endif()

if(DILOCO_HAS_CUDA)
  message(STATUS "CUDA kernels: built (${cuda_reason})")
else()
  message(STATUS "CUDA kernels: not built (${cuda_reason})")
endif()
