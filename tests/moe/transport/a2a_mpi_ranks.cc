// a2a_mpi_ranks RANKS CASES: runs random exchanges over the mpi fabric under mpirun and compares them with
// plain loops, bit for bit.
#include <cstdio>
#include <cstdlib>

#include "moe/a2a_case.h"

int main(int argc, char** argv) {
  using namespace fp4moe::test;
  if (argc != 3) {
    std::puts("usage: a2a_mpi_ranks RANKS CASES");
    return 2;
  }
  const int ranks = std::atoi(argv[1]), cases = std::atoi(argv[2]);
  A2aWorld world({.ranks = ranks,
                  .dp = ranks,
                  .fabric = "mpi",
                  .heap_bytes = 1 << 20,
                  .record_bytes = 128 << 10,
                  .timeout_seconds = 60});
  Draw draw(1);
  for (int i = 0; i < cases; ++i) {
    const A2aCase c = random_case(ranks, ranks, draw);
    if (const std::string wrong = difference(c, world.run(c, 2)); !wrong.empty()) {
      std::printf("case %d: %s\n", i, wrong.c_str());
      return 1;
    }
  }
  std::printf("%d cases equal bit for bit\n", cases);
  return 0;
}
