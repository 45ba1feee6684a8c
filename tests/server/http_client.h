// A blocking HTTP client for tests that sends exactly the given bytes.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace fp4moe {

struct HttpAnswer {
  int status = 0;                              // 0 if the connection ended before the end of the response
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // de-chunked
};

class HttpClient {
 public:
  explicit HttpClient(int port);  // to 127.0.0.1; every wait is limited to 10 s
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  void send(std::string_view bytes);
  HttpAnswer receive();                         // the next complete response
  bool receive_until(std::string_view needle);  // reads raw bytes until `needle` arrives
  bool at_end();                                // waits for more bytes; true if the server closes instead
  void shut_sending();
  void reset();  // closes with RST

 private:
  bool fill();
  int socket_ = -1;
  std::string buffer_;
};

std::string get_request(const std::string& path, const std::string& headers = "");
std::string post_request(const std::string& path, const std::string& body, const std::string& headers = "");

// One request on a new connection.
HttpAnswer http_get(int port, const std::string& path, const std::string& headers = "");
HttpAnswer http_post(int port, const std::string& path, const std::string& body,
                     const std::string& headers = "");

}  // namespace fp4moe
