# docs/flags.md must equal the output of `fp4moe manual --markdown`. To regenerate it:
#   fp4moe manual --markdown > docs/flags.md
execute_process(COMMAND "${BINARY}" manual --markdown OUTPUT_VARIABLE printed RESULT_VARIABLE code)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "${BINARY} manual --markdown ended with ${code}")
endif()
file(READ "${DOCS}/flags.md" page)
if(NOT printed STREQUAL page)
  message(FATAL_ERROR "docs/flags.md is out of date; regenerate it: ${BINARY} manual --markdown > docs/flags.md")
endif()
