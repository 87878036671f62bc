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

-- Set variables for what Triton must not get in a ModelInferRequest:
--   txn.wraps  if there are integers in typed fields, which Triton reduces to 8 or 16 bits
--   txn.batch  the first number of an input's shape, which Triton reduces to 32 bits
--   txn.long   if a name, a shape or another field without the data of an input has more than LONGEST bytes
--
-- The start of the body is enough: protobuf writes the fields in the order of their numbers, so the inputs (5), with
-- their shape (3) and contents (5), come before raw_input_contents (7).

local INPUTS, RAW_INPUTS = 5, 7 -- of ModelInferRequest
local SHAPE, CONTENTS = 3, 5 -- of an input
local LONGEST = 4096 -- an error of Triton that repeats a longer name does not fit into the headers of an answer
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

-- Return whether an input has integers in typed fields, the first number of its shape or nil, and whether a field is
-- too long.
local function numbers_of(text, at, last)
  local integers, batch, long = false, nil, false
  local number, start, stop = next_field(text, at, last)
  while number do
    if number ~= CONTENTS and stop - start >= LONGEST then long = true end
    if number == SHAPE and stop >= start then
      batch = batch or varint(text, start)
    elseif number == CONTENTS and stop >= start then
      local key = varint(text, start)
      integers = integers or (key ~= nil and INTEGERS[key >> 3] == true)
    end
    number, start, stop = next_field(text, stop + 1, last)
  end
  return integers, batch, long
end

core.register_action("gmmvit_numbers", { "http-req" }, function(txn)
  local body = txn.f:req_body()
  if body == nil then return end
  local number, start, stop = next_field(body, 6, #body) -- after the compressed flag and the length
  while number and number ~= RAW_INPUTS do
    if number == INPUTS then
      local integers, batch, long = numbers_of(body, start, math.min(stop, #body))
      if integers then txn:set_var("txn.wraps", 1) end
      if batch then txn:set_var("txn.batch", batch) end
      if long then txn:set_var("txn.long", 1) end
    elseif stop - start >= LONGEST then
      txn:set_var("txn.long", 1)
    end
    number, start, stop = next_field(body, stop + 1, #body)
  end
end)
