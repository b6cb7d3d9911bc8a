-- Executes the script that replay.py inserts below for each case in the first key, on a table of keys instead of
-- the server's. Replies with the number of the first case whose result is not that in the second key, or 0;
-- without a second key, with the results.

local cases = cmsgpack.unpack(redis.call('GET', KEYS[1]))
local expected = redis.call('GET', KEYS[2])
expected = expected and cmsgpack.unpack(expected)

local KEYS, ARGV, values, expiries, now_us, published, is_mute

local function is_absent(key)
  if expiries[key] and expiries[key] < math.floor(now_us / 1000) then
    values[key], expiries[key] = nil, nil
  end
  return values[key] == nil
end

local function expire(key, ms)
  assert(string.find(ms, '^%d+$') and tonumber(ms) > 0, 'invalid expire time')
  expiries[key] = math.floor(now_us / 1000) + ms
end

local ARITY = {TIME = 0, GET = 1, PTTL = 1, PEXPIRE = 2, PUBLISH = 2}
local commands = {}

function commands.TIME()
  local seconds = math.floor(now_us / 1000000)
  return {string.format('%.0f', seconds), string.format('%.0f', now_us - seconds * 1000000)}
end

function commands.GET(key)
  if not is_absent(key) and values[key] == true then
    error('WRONGTYPE', 0)
  end
  return values[key] or false
end

function commands.SET(key, value, option, number, ...)
  assert(key and value and select('#', ...) == 0)
  if option == 'KEEPTTL' then
    assert(not number)
    is_absent(key)
  elseif option == 'PX' or option == 'EX' then
    expire(key, option == 'PX' and number or number .. '000')
  else
    assert(not option)
    expiries[key] = nil
  end
  values[key] = value
end

function commands.DEL(...)
  local count = 0
  for _, key in ipairs({...}) do
    count = count + (is_absent(key) and 0 or 1)
    values[key], expiries[key] = nil, nil
  end
  return count
end

function commands.PEXPIRE(key, ms)
  if not is_absent(key) then
    expire(key, ms)
  end
end

function commands.PTTL(key)
  if is_absent(key) then
    return -2
  end
  return expiries[key] and expiries[key] - math.floor(now_us / 1000) or -1
end

function commands.PUBLISH(channel, message)
  assert(not is_mute)
  published = published .. channel .. message .. ' '
  return 1
end

local redis = {}

function redis.call(name, ...)
  local arguments = {...}
  for number = 1, select('#', ...) do
    local argument = arguments[number]
    if type(argument) == 'number' then
      arguments[number] = string.format('%.17g', argument)
    end
    assert(type(arguments[number]) == 'string')
  end
  assert(name == 'SET' or name == 'DEL' or #arguments == ARITY[name], 'wrong number of arguments')
  return commands[name](unpack(arguments))
end

function redis.pcall(...)
  local succeeded, reply = pcall(redis.call, ...)
  if succeeded then
    return reply
  end
  return {err = reply}
end

local function script()
SCRIPT
end

local results = {}
for number, case in ipairs(cases) do
  KEYS, ARGV, values, expiries, published, now_us = case.keys, case.argv, {}, {}, '', NOW
  is_mute = case.is_mute
  for index, key in ipairs(case.names) do
    values[key], expiries[key] = case.values[index], case.expiries[index]
  end
  local succeeded, reply = pcall(script)
  if type(reply) == 'table' then
    reply = reply.err
  end
  local result = {(succeeded or reply == 'WRONGTYPE') and reply or tostring(reply), published}
  for _, key in ipairs(case.names) do
    local value = not is_absent(key) and values[key]
    table.insert(result, value == true and 'WRONGTYPE' or value)
    table.insert(result, commands.PTTL(key))
  end
  if expected and cmsgpack.pack(result) ~= cmsgpack.pack(cmsgpack.unpack(expected[number])) then
    return number
  end
  results[number] = result
end
return expected and 0 or results
