# Runs whole models on emulated CPUs without AVX-512 and without AVX2; their logits must be bitwise equal to
# this machine's with the same instruction set.
find_program(QEMU qemu-x86_64)
if(NOT QEMU)
  message("SKIPPED: qemu-x86_64 is not installed (Debian's qemu-user)")
  return()
endif()

unset(ENV{FP4MOE_ISA})  # both CPUs detect their own ISA
file(WRITE "${OUT}/ids.json" "[1, 17, 45, 200, 33, 7, 9, 11, 250, 4, 3, 60]")

# Runs a subcommand, with `command` in front of the binary; its output is in `said`.
function(run_verb command)
  execute_process(COMMAND ${command} "${BINARY}" ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${command} fp4moe ${ARGN}: ended with ${result}, output: ${out}${err}")
  endif()
  set(said "${out}${err}" PARENT_SCOPE)
endfunction()

foreach(model demo-gptoss-mxfp4 demo-dsv3-nvfp4)
  foreach(pair "Haswell;avx2" "Nehalem;scalar")
    list(GET pair 0 cpu)
    list(GET pair 1 isa)
    set(emulated "${QEMU};-cpu;${cpu}")
    run_verb("${emulated}" plan "${MODELS}/${model}")
    if(NOT said MATCHES "by cpu_${isa} ")
      message(FATAL_ERROR "${model} on an emulated ${cpu}: expected cpu_${isa}, output: ${said}")
    endif()
    set(logits logits "${MODELS}/${model}" --input-ids "${OUT}/ids.json" --output)
    run_verb("${emulated}" ${logits} "${OUT}/emulated.safetensors")
    run_verb("${CMAKE_COMMAND};-E;env;FP4MOE_ISA=${isa}" ${logits} "${OUT}/native.safetensors")
    file(SHA256 "${OUT}/emulated.safetensors" emulated_hash)
    file(SHA256 "${OUT}/native.safetensors" native_hash)
    if(NOT emulated_hash STREQUAL native_hash)
      message(FATAL_ERROR "${model}: logits on an emulated ${cpu} differ from those with FP4MOE_ISA=${isa}")
    endif()
  endforeach()
endforeach()
