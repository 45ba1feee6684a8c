// The stacks of the binary's threads.
#pragma once

#include <functional>

namespace fp4moe {

// Calls `program` where every thread has the stack that the CPU kernels need, whatever `ulimit -s` says:
// raises the size for threads that start from now on, and for the main thread; if its hard limit is less,
// `program` runs on another thread. Returns the result of `program`, which must not throw.
int run_with_large_stacks(const std::function<int()>& program);

}  // namespace fp4moe
