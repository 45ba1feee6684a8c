# cmake -DROOT=src -DCOMPILERS=TEXT -DOUT=FILE -P: writes FILE with kernels_id(), which identifies the code
# that runs expert layers, and packing_id(), which identifies the code that packs weights. Both are the first
# 12 digits of a hash of the sources and compilers, independent of the source folder's location.
function(hash_folders result)
  list(TRANSFORM ARGN PREPEND "${ROOT}/")
  list(TRANSFORM ARGN APPEND "/*")
  file(GLOB_RECURSE files RELATIVE "${ROOT}" ${ARGN})
  list(SORT files)
  set(text "${COMPILERS}")
  foreach(name ${files})
    file(SHA256 "${ROOT}/${name}" hash)
    string(APPEND text "\n${name} ${hash}")
  endforeach()
  string(SHA256 id "${text}")
  string(SUBSTRING "${id}" 0 12 id)
  set(${result} "${id}" PARENT_SCOPE)
endfunction()

hash_folders(kernels kernels moe)
hash_folders(packing formats io kernels model moe)
file(WRITE "${OUT}" "#include \"engine/startup/kernels_id.h\"\n\n"
                    "namespace fp4moe {\n"
                    "const char* kernels_id() { return \"${kernels}\"; }\n"
                    "const char* packing_id() { return \"${packing}\"; }\n"
                    "}  // namespace fp4moe\n")
