# Fails if a kernel source that is compiled for one ISA emits a weak (mergeable) function outside its own
# namespace, because the linker might use that copy on every CPU. Arguments: NM, ISA, OBJECTS (a ;-list).
foreach(object ${OBJECTS})
  execute_process(COMMAND ${NM} --demangle --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* W [^\n]*" weak "${symbols}")
  foreach(symbol ${weak})
    if(NOT symbol MATCHES "fp4moe::cpu_${ISA}::")
      message(SEND_ERROR "${object}: shared symbol compiled for ${ISA}: ${symbol}")
    endif()
  endforeach()
endforeach()
