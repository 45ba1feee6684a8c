// Slots to rows by expert, and rows back to tokens (moe_sort.cu, moe_combine.cu), behind DeviceMoeOps.
#pragma once

#include "kernels/device_moe.h"

namespace fp4moe {

void moe_sort(const MoeSortArgs& a);
void moe_combine(const MoeCombineArgs& a);

}  // namespace fp4moe
