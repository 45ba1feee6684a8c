# fp4moe_embed(VARIABLE NAME FILE): sets VARIABLE to the path of a generated source that defines
# `extern const char NAME[]` in namespace fp4moe, with FILE's text.
function(fp4moe_embed variable name file)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/${name}.cc")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
  file(READ "${file}" text)
  file(CONFIGURE OUTPUT "${source}" @ONLY CONTENT
       "namespace fp4moe {\nextern const char ${name}[];\nconst char ${name}[] = R\"embedded(@text@)embedded\";\n}\n")
  set(${variable} "${source}" PARENT_SCOPE)
endfunction()
