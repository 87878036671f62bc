-- Two programs that HAProxy runs for the gateway.
--
-- gmmvit_refuse: refuse a request after its body was read.
--
-- HAProxy 2.6 ends an HTTP/2 stream with RST_STREAM(CANCEL) if it answers before the end of the body: gRPC clients
-- then report CANCELLED, and never see the status. A client of HTTP/1 that still sends may see a closed connection.
-- This service reads and drops the body, up to MOST bytes, and answers afterwards.
--
-- txn.refused: "STATUS MESSAGE"; STATUS is a status of HTTP or, if txn.protocol is "grpc", of gRPC.

local MOST = 64 * 1024 * 1024
local PIECE = 65536

core.register_service("gmmvit_refuse", "http", function(applet)
  local dropped = 0
  while dropped < MOST do
    local piece = applet:receive(PIECE)
    if piece == nil or #piece == 0 then break end
    dropped = dropped + #piece
  end
  local status, message = string.match(applet:get_var("txn.refused"), "^(%d+) (.*)$")
  if applet:get_var("txn.protocol") == "grpc" then
    applet:set_status(200)
    applet:add_header("content-type", "application/grpc")
    applet:add_header("grpc-status", status)
    applet:add_header("grpc-message", message)
    applet:add_header("content-length", "0")
    applet:start_response()
    return
  end
  local body = '{"error":"' .. message .. '"}'
  applet:set_status(tonumber(status))
  applet:add_header("content-type", "application/json")
  applet:add_header("content-length", tostring(#body))
  if status == "401" then applet:add_header("www-authenticate", "Bearer") end
  if status == "503" then applet:add_header("retry-after", "1") end
  applet:start_response()
  if applet.method ~= "HEAD" then applet:send(body) end
end)

-- Set txn.wraps if a ModelInferRequest has integers in typed fields, which Triton reduces to 8 or 16 bits.
--
-- The start of the body is enough: protobuf writes the fields in the order of their numbers, so the inputs (5), with
-- their contents (5), come before raw_input_contents (7).

local INPUTS, CONTENTS, RAW_INPUTS = 5, 5, 7
local INTEGERS = { [2] = true, [4] = true } -- int_contents and uint_contents of InferTensorContents

local function varint(text, at)
  local value, shift = 0, 0
  while shift < 64 do
    local byte = string.byte(text, at)
    if byte == nil then return nil end
    value = value | ((byte & 127) << shift)
    at = at + 1
    if byte < 128 then return value, at end
    shift = shift + 7
  end
end

-- Return number and start of the next field with a length, and where it ends, or nil at the end or in other data.
local function next_field(text, at, last)
  while at <= last do
    local key, length, start
    key, at = varint(text, at)
    if key == nil then return nil end
    local wire = key & 7
    if wire == 2 then
      length, start = varint(text, at)
      if length == nil or length < 0 then return nil end
      return key >> 3, start, start + length - 1
    elseif wire == 0 then
      key, at = varint(text, at)
      if key == nil then return nil end
    elseif wire == 1 then
      at = at + 8
    elseif wire == 5 then
      at = at + 4
    else
      return nil
    end
  end
end

local function has_integers(text, at, last)
  local number, start, stop = next_field(text, at, last)
  while number do
    if number == CONTENTS then
      local key = varint(text, start)
      if key and stop >= start and INTEGERS[key >> 3] then return true end
    end
    number, start, stop = next_field(text, stop + 1, last)
  end
  return false
end

core.register_action("gmmvit_wraps", { "http-req" }, function(txn)
  local body = txn.f:req_body()
  if body == nil then return end
  local number, start, stop = next_field(body, 6, #body) -- after the compressed flag and the length
  while number and number ~= RAW_INPUTS do
    if number == INPUTS and has_integers(body, start, math.min(stop, #body)) then
      txn:set_var("txn.wraps", 1)
      return
    end
    number, start, stop = next_field(body, stop + 1, #body)
  end
end)
