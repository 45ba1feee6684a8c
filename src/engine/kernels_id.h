// Which kernels a binary has.
#pragma once

namespace fp4moe {

// Twelve hex digits: other ones after any change of src/kernels, src/moe or the compilers. The build makes
// it.
const char* kernels_id();

}  // namespace fp4moe
