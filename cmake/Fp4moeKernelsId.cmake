# cmake -DROOT=src -DCOMPILERS=TEXT -DOUT=FILE -P: writes kernels_id(), which names what runs expert layers: the
# start of a hash of the sources and of the compilers, the same wherever they lie.
file(GLOB_RECURSE files RELATIVE "${ROOT}" "${ROOT}/kernels/*" "${ROOT}/moe/*")
list(SORT files)
set(text "${COMPILERS}")
foreach(name ${files})
  file(SHA256 "${ROOT}/${name}" hash)
  string(APPEND text "\n${name} ${hash}")
endforeach()
string(SHA256 id "${text}")
string(SUBSTRING "${id}" 0 12 id)
file(WRITE "${OUT}" "#include \"engine/kernels_id.h\"\n\n"
                    "namespace fp4moe {\nconst char* kernels_id() { return \"${id}\"; }\n}  // namespace fp4moe\n")
