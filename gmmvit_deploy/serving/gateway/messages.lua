-- Two actions that HAProxy runs for the gateway. They let through only requests that are well-formed as far as Triton
-- interprets numbers and nesting, and set txn.refused for all others: "STATUS MESSAGE".
--
--   gmmvit_json     the JSON in front of binary tensors, at most 4096 bytes (HTTP)
--   gmmvit_message  a ModelInferRequest (gRPC)
--
-- Argument of both: "refuse" or "allow", whether numbers inside JSON or typed fields are permitted.
-- Both read each byte at most once, and nest as deep as the known fields.

local MOST_BATCH = 999999 -- Triton keeps the size of a batch in 32 bits
local MOST_DIMENSIONS = 16
local DEEPEST_DATA = 8
local LARGE_BATCH = "the first number of the shape is too large"

-- JSON ---------------------------------------------------------------------------------------------------------------

-- A reader raises an error of this form: { "reason" }.
local function wrong(reason) error({ reason }, 0) end

local function skip(text, at) return string.match(text, "^[ \t\r\n]*()", at) end

local function expect(text, at, character, reason)
  if string.sub(text, at, at) ~= character then wrong(reason or "the JSON is malformed") end
  return skip(text, at + 1)
end

-- Return where a text ends. Control characters are no JSON; a backslash is an escape.
local function read_string(text, at)
  expect(text, at, '"')
  at = at + 1
  while true do
    local stop = string.match(text, '^[^"\\%c]*()', at)
    local character = string.sub(text, stop, stop)
    if character == '"' then return skip(text, stop + 1) end
    if character ~= "\\" then wrong("the JSON is malformed") end
    at = string.match(text, '^\\["\\/bfnrt]()', stop) or string.match(text, "^\\u%x%x%x%x()", stop)
    if at == nil then wrong("the JSON is malformed") end
  end
end

local function read_scalar(text, at)
  if string.sub(text, at, at) == '"' then return read_string(text, at) end
  local word, stop = string.match(text, "^([%w%.+-]+)()", at)
  if word == nil then wrong("the JSON has a value of an unexpected type") end
  local number = string.match(word, "^%-?%d+%.?%d*$") or string.match(word, "^%-?%d+%.?%d*[eE][+-]?%d+$")
  if not number and word ~= "true" and word ~= "false" and word ~= "null" then wrong("the JSON is malformed") end
  return skip(text, stop)
end

-- Read "[value, ...]" with a reader of a value, which gets the number of the value.
local function read_array(text, at, read)
  at = expect(text, at, "[", "the JSON has a value of an unexpected type")
  local count = 0
  if string.sub(text, at, at) == "]" then return skip(text, at + 1) end
  while true do
    count = count + 1
    at = read(text, at, count)
    if string.sub(text, at, at) == "]" then return skip(text, at + 1) end
    at = expect(text, at, ",")
  end
end

-- Read '{"key": value, ...}'. readers: key -> reader; a reader under the key true is for every other key.
local function read_object(text, at, readers)
  at = expect(text, at, "{", "the JSON has a value of an unexpected type")
  local seen = {}
  if string.sub(text, at, at) == "}" then return skip(text, at + 1) end
  while true do
    local key, stop = string.match(text, '^"([%w_.-]+)"()', at)
    if key == nil then wrong("the JSON has a key of other characters than letters, digits, _, . and -") end
    if seen[key] then wrong("the JSON has a key twice") end
    seen[key] = true
    local read = readers[key] or readers[true]
    if read == nil then wrong("the JSON has an unknown key") end
    at = read(text, expect(text, skip(text, stop), ":"))
    if string.sub(text, at, at) == "}" then return skip(text, at + 1) end
    at = expect(text, at, ",")
  end
end

local function read_dimension(text, at, number)
  local digits, stop = string.match(text, "^(%d+)()", at)
  if digits == nil or number > MOST_DIMENSIONS then wrong("the shape must have up to 16 whole numbers from 0") end
  if #digits > 6 then wrong(number == 1 and LARGE_BATCH or "a number of the shape is too large") end
  if string.match(text, "^[%.eE]", stop) then wrong("the shape must have up to 16 whole numbers from 0") end
  return skip(text, stop)
end

local function read_shape(text, at) return read_array(text, at, read_dimension) end

local function read_parameters(text, at) return read_object(text, at, { [true] = read_scalar }) end

local function refuse_data() wrong("tensors in JSON are refused; send binary tensors") end

local function read_data(text, at, depth)
  if string.sub(text, at, at) ~= "[" then return read_scalar(text, at) end
  if depth >= DEEPEST_DATA then wrong("the data of a tensor is nested too deep") end
  return read_array(text, at, function(inner, place) return read_data(inner, place, depth + 1) end)
end

local function reader_of_requests(data)
  local input = { name = read_string, datatype = read_string, shape = read_shape, parameters = read_parameters }
  local output = { name = read_string, parameters = read_parameters }
  input.data = data == "allow" and function(text, at) return read_data(text, at, 0) end or refuse_data
  -- Clients of kserve repeat the name of the model, which Triton takes from the path alone.
  local keys = { id = read_scalar, model_name = read_string, parameters = read_parameters }
  keys.inputs = function(text, at)
    return read_array(text, at, function(inner, place) return read_object(inner, place, input) end)
  end
  keys.outputs = function(text, at)
    return read_array(text, at, function(inner, place) return read_object(inner, place, output) end)
  end
  return function(text, at) return read_object(text, at, keys) end
end

local READERS = { allow = reader_of_requests("allow"), refuse = reader_of_requests("refuse") }

local function refuse(txn, status, reason) txn:set_var("txn.refused", status .. " " .. reason) end

core.register_action("gmmvit_json", { "http-req" }, function(txn, data)
  local length = tonumber(txn.f:req_fhdr("inference-header-content-length") or "")
  if length == nil or length == 0 then return end
  local text = string.sub(txn.f:req_body() or "", 1, length)
  if #text < length then
    refuse(txn, 400, "Inference-Header-Content-Length is larger than the body, or the headers are too large")
    return
  end
  local sound, stop = pcall(function() return READERS[data](text, skip(text, 1)) end)
  if not sound then
    refuse(txn, 400, type(stop) == "table" and stop[1] or "the JSON is malformed")
  elseif stop ~= length + 1 then
    refuse(txn, 400, "the JSON is malformed")
  end
end, 1)

-- protobuf -----------------------------------------------------------------------------------------------------------
--
-- Every field of ModelInferRequest and of its inputs has a length. A message is refused unless its fields are known and
-- in the order of their numbers, as protobuf writes them. The start of the body is then enough: the inputs (5), with
-- their shape (3) and contents (5), come before raw_input_contents (7). Behind the start, a message can only add an
-- input, of which Triton refuses a second of the same name, and every other name that the model does not have.

local INPUTS, RAW_INPUTS = 5, 7 -- of ModelInferRequest
local DATA_TYPE, SHAPE, CONTENTS = 2, 3, 5 -- of an input
local LONGEST = 4096 -- an error of Triton that repeats a longer name does not fit into the headers of an answer
local REPEATED = { [4] = true, [5] = true, [6] = true, [7] = true } -- parameters, inputs, outputs, raw_input_contents
local REPEATED_OF_INPUT = { [4] = true } -- parameters
local EXACT = { -- data types whose typed contents have numbers of the same size
  BOOL = true, BYTES = true, FP32 = true, FP64 = true, INT32 = true, INT64 = true, UINT32 = true, UINT64 = true,
}
local ORDER = "the message is no ModelInferRequest with its fields in the order of their numbers"
local TOO_LONG = "a name, the request id, the parameters or a shape is too long"
local TYPED = "integers in typed contents are refused; send raw_input_contents"

-- Return a number of up to 9 bytes and where the next byte is, or nil.
local function varint(text, at)
  local value = 0
  for shift = 0, 56, 7 do
    local byte = string.byte(text, at)
    if byte == nil then return nil end
    value = value | ((byte & 127) << shift)
    at = at + 1
    if byte < 128 then return value, at end
  end
end

-- Return number, start and end of the field at ``at``.
local function field(text, at, before, most, repeated)
  local key = string.byte(text, at)
  local number = key >> 3
  local length, start = varint(text, at + 1)
  local late = number < before or number == before and not repeated[number]
  if key & 7 ~= 2 or number < 1 or number > most or late or length == nil then wrong(ORDER) end
  return number, start, start + length - 1
end

local function check_shape(text, at, last)
  for number = 1, MOST_DIMENSIONS + 1 do
    if at > last then return end
    local dimension
    dimension, at = varint(text, at)
    if dimension == nil or number > MOST_DIMENSIONS then wrong("the shape must have up to 16 whole numbers from 0") end
    if dimension > MOST_BATCH then wrong(number == 1 and LARGE_BATCH or "a number of the shape is too large") end
  end
end

-- last: the end of the input; have: the end of the bytes in the buffer.
local function check_input(text, at, last, have, typed)
  local before, data_type = 0, ""
  while at <= last do
    if at + 10 > have and have < last then wrong(TOO_LONG) end
    local number, start, stop = field(text, at, before, CONTENTS, REPEATED_OF_INPUT)
    if stop > last then wrong(ORDER) end
    if number ~= CONTENTS and stop - start >= LONGEST then wrong(TOO_LONG) end
    if number ~= CONTENTS and stop > have then wrong(TOO_LONG) end
    if number == DATA_TYPE then
      data_type = string.sub(text, start, stop)
    elseif number == SHAPE then
      check_shape(text, start, stop)
    elseif number == CONTENTS and stop >= start and typed == "refuse" and not EXACT[data_type] then
      wrong(TYPED)
    end
    before, at = number, stop + 1
  end
end

local function check_message(body, typed)
  local have = #body
  local last = 5 + (string.unpack(">I4", body, 2)) -- a message follows its compressed flag and its length
  local at, before, inputs = 6, 0, 0
  while at <= last do
    if at + 10 > have and have < last then -- a key and a length have up to 10 bytes
      if inputs == 0 then wrong(TOO_LONG) end
      return
    end
    local number, start, stop = field(body, at, before, RAW_INPUTS, REPEATED)
    if stop > last then wrong(ORDER) end
    if number == INPUTS then
      inputs = inputs + 1
      check_input(body, start, stop, have, typed)
    elseif number == RAW_INPUTS then
      if inputs == 0 then wrong(ORDER) end
    elseif stop - start >= LONGEST then
      wrong(TOO_LONG)
    end
    before, at = number, stop + 1
  end
end

core.register_action("gmmvit_message", { "http-req" }, function(txn, typed)
  local body = txn.f:req_body() or ""
  if #body < 5 then return end
  local sound, problem = pcall(check_message, body, typed)
  if not sound then refuse(txn, 3, type(problem) == "table" and problem[1] or ORDER) end
end, 1)
