// The oracle of kernels/device_drafts.h, on host memory.
#pragma once

#include "kernels/device_drafts.h"

namespace fp4moe::ref {

void accept_drafts(const AcceptDraftsArgs& args);
void move_rows(const MoveRowsArgs& args);
void move_randoms(const MoveRandomsArgs& args);

}  // namespace fp4moe::ref
