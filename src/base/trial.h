// Features that the program refuses until their tests have passed on the hardware that they need.
#pragma once

#include <string_view>

namespace fp4moe {

// Whether a test of the feature runs: $FP4MOE_TRIAL lists the features on trial, separated by commas.
bool is_on_trial(std::string_view feature);

}  // namespace fp4moe
