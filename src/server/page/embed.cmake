# cmake -D PAGE=chat.html -D OUT=chat_page_text.cc -P embed.cmake
# Writes the page as a C++ string, with the script and style hashes for its Content-Security-Policy.
cmake_minimum_required(VERSION 3.25)

# The CSP source 'sha256-...' (base64) of the text between <tag> and </tag>.
function(source_hash out text tag)
  string(FIND "${text}" "<${tag}>" begin)
  string(FIND "${text}" "</${tag}>" end)
  string(LENGTH "<${tag}>" skip)
  math(EXPR begin "${begin} + ${skip}")
  math(EXPR length "${end} - ${begin}")
  if(length LESS 1)
    message(FATAL_ERROR "${PAGE}: no <${tag}>")
  endif()
  string(SUBSTRING "${text}" ${begin} ${length} inside)
  string(SHA256 hex "${inside}")
  set(letters "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
  set(base64 "")
  string(APPEND hex "00")  # 32 bytes are 11 groups of three, the last one byte short
  foreach(group RANGE 10)
    math(EXPR at "6 * ${group}")
    string(SUBSTRING "${hex}" ${at} 6 digits)
    foreach(shift 18 12 6 0)
      math(EXPR letter "0x${digits} >> ${shift} & 63")
      string(SUBSTRING "${letters}" ${letter} 1 letter)
      string(APPEND base64 "${letter}")
    endforeach()
  endforeach()
  string(REGEX REPLACE ".$" "=" base64 "${base64}")
  set(${out} "'sha256-${base64}'" PARENT_SCOPE)
endfunction()

# Keep the page one string: as a CMake list it would lose brackets and semicolons.
file(READ "${PAGE}" page)
source_hash(script "${page}" script)
source_hash(style "${page}" style)
file(WRITE "${OUT}" "// Written from chat.html by embed.cmake.
#include \"server/api/chat_page.h\"

namespace fp4moe {
const char kChatPage[] = R\"fp4moe_page(${page})fp4moe_page\";
const char kChatPageScript[] = \"${script}\";
const char kChatPageStyle[] = \"${style}\";
}  // namespace fp4moe
")
