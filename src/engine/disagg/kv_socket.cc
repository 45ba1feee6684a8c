#include "engine/disagg/kv_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "engine/disagg/kv_resolve.h"

namespace fp4moe {
namespace {

constexpr double kMaxConnectSeconds = 5;
constexpr int64_t kFirstAllocation = 1 << 20;  // payload bytes that need no budget
constexpr size_t kMaxWakesAt = 256 << 10;
constexpr std::chrono::milliseconds kLookAgain{50};

Status system_error(const char* what, int error) {
  return unavailable(std::string(what) + ": " + std::strerror(error));
}

Status closed_by_peer() { return unavailable("the connection was closed by the other side"); }

// TCP keepalive: a dead machine is detected after about 15 s.
void set_options(int descriptor) {
  const int on = 1, idle_seconds = 5, interval_seconds = 3, probes = 3, unacknowledged_ms = 15000;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof idle_seconds);
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, &interval_seconds, sizeof interval_seconds);
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
}

// Returns 0 or an errno value.
int connect_within(int descriptor, const addrinfo& address, int timeout_ms) {
  if (::connect(descriptor, address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd waits{descriptor, POLLOUT, 0};
  int ready;
  do ready = poll(&waits, 1, timeout_ms);
  while (ready < 0 && errno == EINTR);
  if (ready <= 0) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

}  // namespace

// ---- deadlines ------------------------------------------------------------------------------------

// Progress of one frame. Its deadline advances with the bytes transferred.
struct KvSocket::Progress {
  Progress(double seconds, Clock::time_point end_by) : timeout_seconds(seconds), end(end_by) {}

  void add(ssize_t count) {
    num_bytes += count;
    last = Clock::now();
  }
  Clock::time_point deadline() const {
    const auto seconds = [](double count) {
      return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
    };
    const auto at_rate =
        start + seconds(timeout_seconds + static_cast<double>(num_bytes) / kKvBytesPerSecond);
    return std::min({at_rate, last + seconds(timeout_seconds), end});
  }

  const double timeout_seconds;
  const Clock::time_point end, start = Clock::now();
  Clock::time_point last = start;
  int64_t num_bytes = 0;
};

Status KvSocket::wait(short events, Clock::time_point deadline) const {
  for (;;) {
    int timeout_ms = -1;
    if (deadline != Clock::time_point::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
      timeout_ms = static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
    }
    pollfd waits{descriptor_, events, 0};
    const int ready = ::poll(&waits, 1, timeout_ms);
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return system_error("poll", errno);
    if (deadline != Clock::time_point::max() && Clock::now() >= deadline)
      return unavailable(events == POLLIN ? "the other side sends nothing, or too slowly"
                                          : "the other side reads nothing, or too slowly");
  }
}

void KvSocket::wake_at(size_t num_bytes) {
  const int at = static_cast<int>(std::min(num_bytes, kMaxWakesAt));
  if (at == wakes_at_) return;
  if (setsockopt(descriptor_, SOL_SOCKET, SO_RCVLOWAT, &at, sizeof at) == 0) wakes_at_ = at;
}

// Waits until many of the next num_bytes bytes have arrived: over loopback, on a virtual machine, the sender
// needs 15 to 20 us to wake the receiver, in which it could send 100 KiB. But waits no longer than
// kLookAgain, so that the bytes of a slow peer count in time.
Status KvSocket::wait_for_bytes(size_t num_bytes, Clock::time_point deadline) {
  const auto look_again = Clock::now() + kLookAgain;
  if (look_again >= deadline) {
    wake_at(1);
    return wait(POLLIN, deadline);
  }
  wake_at(num_bytes);
  pollfd waits{descriptor_, POLLIN, 0};
  if (::poll(&waits, 1, static_cast<int>(kLookAgain.count())) < 0 && errno != EINTR)
    return system_error("poll", errno);
  return {};
}

// ---- a connection ---------------------------------------------------------------------------------

KvSocket::KvSocket(int descriptor, KvSocketOptions options)
    : descriptor_(descriptor), options_(std::move(options)) {
  set_options(descriptor);
  fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
}

KvSocket::~KvSocket() { ::close(descriptor_); }

void KvSocket::shut_down() { ::shutdown(descriptor_, SHUT_RDWR); }

std::string KvSocket::peer() const {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getpeername(descriptor_, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "unknown";
  return std::string(host) + ":" + port;
}

Result<std::unique_ptr<KvSocket>> KvSocket::connect(const NodeAddress& address, bool only_loopback,
                                                    KvSocketOptions options) {
  KvAddresses addresses;
  FP4MOE_RETURN_IF_ERROR(addresses.resolve(address.host, address.port, 0));
  const double seconds = std::min(options.timeout_seconds, kMaxConnectSeconds);
  int error = 0;
  for (const addrinfo* a = addresses.first(); a != nullptr; a = a->ai_next) {
    if (only_loopback && !is_loopback(*a->ai_addr)) continue;
    const int descriptor = ::socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (descriptor < 0) {  // for example an IPv6 address on a host without IPv6
      error = errno;
      continue;
    }
    error = connect_within(descriptor, *a, static_cast<int>(1000 * seconds));
    if (error == 0) return std::make_unique<KvSocket>(descriptor, std::move(options));
    ::close(descriptor);
  }
  if (error == 0)
    return invalid_argument("host " + address.host +
                            " has no loopback address; other addresses need --disaggregation-secret-file");
  return system_error("cannot connect", error);
}

Status KvSocket::send(std::span<const uint8_t> frame) {
  Progress progress(options_.timeout_seconds, Clock::time_point::max());
  while (!frame.empty()) {
    const ssize_t sent = ::send(descriptor_, frame.data(), frame.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      progress.add(sent);
      frame = frame.subspan(static_cast<size_t>(sent));
    } else if (sent < 0 && errno == EAGAIN) {
      FP4MOE_RETURN_IF_ERROR(wait(POLLOUT, progress.deadline()));
    } else if (errno != EINTR) {
      return system_error("the connection broke", errno);
    }
    if (Clock::now() >= progress.deadline() && !frame.empty())
      return unavailable("the other side reads frames too slowly");
  }
  return {};
}

// Fills `bytes`, and ahead_ as far as its bytes arrive with the last of them.
Status KvSocket::read_all(std::span<uint8_t> bytes, Progress& progress) {
  const size_t num_known = std::min(bytes.size(), num_ahead_);
  std::copy_n(ahead_.begin(), num_known, bytes.begin());
  std::copy(ahead_.begin() + num_known, ahead_.begin() + num_ahead_, ahead_.begin());
  num_ahead_ -= num_known;
  bytes = bytes.subspan(num_known);
  while (!bytes.empty()) {
    std::array<iovec, 2> places{iovec{bytes.data(), bytes.size()}, iovec{ahead_.data(), ahead_.size()}};
    const ssize_t got = ::readv(descriptor_, places.data(), static_cast<int>(places.size()));
    if (got > 0) {
      progress.add(got);
      const size_t num_wanted = std::min(bytes.size(), static_cast<size_t>(got));
      num_ahead_ = static_cast<size_t>(got) - num_wanted;
      bytes = bytes.subspan(num_wanted);
    } else if (got == 0) {
      return closed_by_peer();
    } else if (errno == EAGAIN) {
      FP4MOE_RETURN_IF_ERROR(wait_for_bytes(bytes.size(), progress.deadline()));
    } else if (errno != EINTR) {
      return system_error("the connection broke", errno);
    }
    if (Clock::now() >= progress.deadline() && !bytes.empty())
      return unavailable("the other side sends too slowly");
  }
  return {};
}

Result<KvFrame> KvSocket::receive(const KvLegal& legal, Clock::time_point end_by) {
  if (num_ahead_ == 0) {
    wake_at(1);
    FP4MOE_RETURN_IF_ERROR(wait(POLLIN, end_by));
  }
  Progress progress(options_.timeout_seconds, end_by);
  std::array<uint8_t, sizeof(KvFrameHeader)> head;
  FP4MOE_RETURN_IF_ERROR(read_all(head, progress));
  KvFrame frame;
  FP4MOE_ASSIGN_OR_RETURN(frame.header, read_kv_header(head, legal));
  const int64_t num_bytes = frame.header.num_bytes;
  const bool is_budgeted = options_.budget != nullptr && frame.header.type != KvFrameType::kPage;
  if (frame.header.type == KvFrameType::kPage && !spare_.empty()) {
    frame.payload = std::move(spare_.back());
    spare_.pop_back();
  }
  try {
    const int64_t at_once = std::max(kFirstAllocation, std::ssize(frame.payload));
    frame.payload.resize(std::min(frame.payload.size(), static_cast<size_t>(num_bytes)));
    for (int64_t done = 0, next = at_once; done < num_bytes; next *= 2) {
      next = std::min(next, num_bytes);
      if (is_budgeted && next > kFirstAllocation && !options_.budget->raise(frame.lease, next))
        return unavailable("no room for a message of " + std::to_string(num_bytes) +
                           " bytes; the limit for all messages together is " +
                           std::to_string(options_.budget->num_bytes()));
      frame.payload.resize(static_cast<size_t>(next));
      FP4MOE_RETURN_IF_ERROR(read_all(std::span(frame.payload).subspan(static_cast<size_t>(done)), progress));
      done = next;
    }
  } catch (const std::bad_alloc&) {
    return unavailable("no memory for a message of " + std::to_string(num_bytes) + " bytes");
  }
  FP4MOE_RETURN_IF_ERROR(check_kv_payload(frame.header, frame.payload));
  return frame;
}

}  // namespace fp4moe
