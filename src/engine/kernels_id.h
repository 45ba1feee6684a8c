// Which kernels a binary has.
#pragma once

namespace fp4moe {

// Twelve hex digits: other ones after any change of src/kernels, src/moe or the compilers. The build makes
// it.
const char* kernels_id();
// The same of src/formats, src/io, src/kernels, src/model and src/moe: of what makes packed weights of a
// checkpoint.
const char* packing_id();

}  // namespace fp4moe
