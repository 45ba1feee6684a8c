// Tests the names of fabrics and the environments of launchers.
#include "comm/fabric.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "comm/job.h"

namespace fp4moe {
namespace {

constexpr const char* kVariables[] = {
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",     "PMI_SIZE",
    "SLURM_PROCID",         "SLURM_NTASKS",         "SLURM_STEP_ID"};

using Environment = std::map<std::string, std::string>;

class FabricTest : public testing::Test {
 protected:
  void SetUp() override { set({}); }
  void TearDown() override { set({}); }
  static void set(const Environment& environment) {
    for (const char* variable : kVariables) unsetenv(variable);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  }
  static void mpirun(int process, int num_processes) {
    set({{"OMPI_COMM_WORLD_RANK", std::to_string(process)},
         {"OMPI_COMM_WORLD_SIZE", std::to_string(num_processes)}});
  }
  static std::string name_of(std::string_view name, int num_ranks) {
    const Result<Fabric> fabric = make_fabric(name, num_ranks);
    EXPECT_TRUE(fabric.ok()) << fabric.status().to_string();
    if (!fabric.ok()) return "";
    EXPECT_EQ(fabric->num_ranks, num_ranks);
    return fabric->name;
  }
  static std::string refusal(std::string_view name, int num_ranks,
                             StatusCode code = StatusCode::kUnsupported) {
    const Result<Fabric> fabric = make_fabric(name, num_ranks);
    EXPECT_FALSE(fabric.ok());
    EXPECT_EQ(fabric.status().code(), code);
    return fabric.status().message();
  }
};

TEST_F(FabricTest, AutoFollowsRanksAndLauncher) {
  EXPECT_EQ(name_of("auto", 1), "local");
  EXPECT_EQ(name_of("auto", 4), "threads");
  mpirun(1, 2);
  EXPECT_EQ(name_of("auto", 4), "mpi");
  EXPECT_EQ(make_fabric("auto", 4)->rank, 2);
  EXPECT_EQ(make_fabric("mpi", 8)->rank, 4);
  mpirun(0, 1);
  EXPECT_EQ(name_of("auto", 1), "local");
  EXPECT_EQ(name_of("auto", 4), "threads");
  EXPECT_EQ(name_of("mpi", 4), "mpi");
}

TEST_F(FabricTest, ForcedNamesAreStrict) {
  EXPECT_EQ(name_of("local", 1), "local");
  EXPECT_EQ(name_of("threads", 1), "threads");
  EXPECT_EQ(name_of("threads", 32), "threads");
  EXPECT_EQ(refusal("local", 2),
            "fabric=local has only 1 rank, but tp=2 needs 2; nearest legal choice: --fabric threads");
  EXPECT_EQ(refusal("mpi", 2),
            "fabric=mpi needs mpirun or srun, and neither started this process; nearest legal choice: "
            "--fabric threads");
  EXPECT_EQ(refusal("nccl", 1, StatusCode::kInvalidArgument),
            "unknown fabric 'nccl'; use auto, local, threads or mpi");
  EXPECT_EQ(refusal("auto", 0, StatusCode::kInvalidArgument), "fabric: num_ranks=0 must be at least 1");
  mpirun(0, 3);
  EXPECT_EQ(
      refusal("threads", 3),
      "fabric=threads runs in one process, but the launcher started 3; nearest legal choice: --fabric mpi");
  EXPECT_EQ(
      refusal("local", 1),
      "fabric=local runs in one process, but the launcher started 3; nearest legal choice: --fabric mpi");
  EXPECT_EQ(refusal("auto", 4),
            "tp=4 does not split evenly over the 3 processes of the launcher; nearest legal choice: --tp 6");
  EXPECT_EQ(refusal("mpi", 2),
            "tp=2 does not split evenly over the 3 processes of the launcher; nearest legal choice: --tp 3");
}

void expect_launcher(const LauncherInfo& info, bool launched, int process, int num_processes) {
  EXPECT_EQ(info.launched, launched);
  EXPECT_EQ(info.process, process);
  EXPECT_EQ(info.num_processes, num_processes);
}

TEST_F(FabricTest, LaunchersAreKnownByTheirEnvironment) {
  expect_launcher(launcher_info(), false, 0, 1);
  mpirun(3, 4);
  expect_launcher(launcher_info(), true, 3, 4);
  set({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  expect_launcher(launcher_info(), true, 1, 2);
  set({{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "0"}});
  expect_launcher(launcher_info(), true, 2, 8);
  // A Slurm allocation without a job step is not a launch.
  set({{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "8"}});
  expect_launcher(launcher_info(), false, 0, 1);
}

TEST_F(FabricTest, OddEnvironmentsAreIgnored) {
  for (const auto& [rank, size] : std::map<std::string, std::string>{
           {"4", "4"}, {"-1", "4"}, {"x", "4"}, {"1", ""}, {"99999999999", "4"}, {"1x", "4"}}) {
    set({{"OMPI_COMM_WORLD_RANK", rank}, {"OMPI_COMM_WORLD_SIZE", size}});
    expect_launcher(launcher_info(), false, 0, 1);
  }
  set({{"OMPI_COMM_WORLD_RANK", "1"}});
  expect_launcher(launcher_info(), false, 0, 1);
}

}  // namespace
}  // namespace fp4moe
