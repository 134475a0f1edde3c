-- The sums of one scope, as in `window.rs`: a hash with the number of requests and tokens of each second, the tokens of each quarter of an
-- hour (r<n>, t<n>, d<n>), their sums (R, T, D), and the oldest and the newest slot of each length. Times are the server's, in ms.

local MINUTE, MINUTES, DAY, DAYS = 1000, 60, 900000, 96
local KEPT_MS = (DAYS + 1) * DAY

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- Drops the slots of one length that are older than the window, and returns the oldest that is left.
local function drop(key, oldest, newest, current, slots, names, sums)
  local first = current - slots
  if not oldest or oldest >= first then return oldest or current end
  local fields = {}
  for slot = oldest, math.min(first - 1, newest) do
    for _, name in ipairs(names) do fields[#fields + 1] = name .. whole(slot) end
  end
  -- All of it may have been dropped before.
  if #fields == 0 then return first end
  local gone = {}
  for at, value in ipairs(redis.call('HMGET', key, unpack(fields))) do
    local sum = sums[(at - 1) % #names + 1]
    gone[sum] = (gone[sum] or 0) + (tonumber(value) or 0)
  end
  redis.call('HDEL', key, unpack(fields))
  for sum, value in pairs(gone) do
    if value ~= 0 then redis.call('HINCRBY', key, sum, whole(-value)) end
  end
  return first
end

-- Reads a scope's sums, without what is older than its windows. A time before an earlier one counts as the earlier one.
local function read(key, now)
  local names = { 'mo', 'mn', 'do', 'dn' }
  local kept, scope = redis.call('HMGET', key, unpack(names)), { key = key }
  for at, name in ipairs(names) do scope[name] = tonumber(kept[at]) end
  scope.minute = math.max(math.floor(now / MINUTE), scope.mn or 0)
  scope.day = math.max(math.floor(now / DAY), scope.dn or 0)
  scope.mo = drop(key, scope.mo, scope.mn, scope.minute, MINUTES, { 'r', 't' }, { 'R', 'T' })
  scope['do'] = drop(key, scope['do'], scope.dn, scope.day, DAYS, { 'd' }, { 'D' })
  if kept[1] then redis.call('HSET', key, 'mo', whole(scope.mo), 'do', whole(scope['do'])) end
  local sums = redis.call('HMGET', key, 'R', 'T', 'D')
  scope.R, scope.T, scope.D = tonumber(sums[1]) or 0, tonumber(sums[2]) or 0, tonumber(sums[3]) or 0
  return scope
end

-- Time until nothing of the last minute counts any more.
local function until_empty(scope, now)
  if not scope.mn or scope.mn < scope.minute - MINUTES then return 0 end
  return math.max((scope.mn + MINUTES + 1) * MINUTE - now, 0)
end

-- Time until this much of one sum no longer counts.
local function until_freed(scope, now, name, much)
  local oldest, newest, length, slots = scope.mo, scope.mn, MINUTE, MINUTES
  if name == 'd' then oldest, newest, length, slots = scope['do'], scope.dn, DAY, DAYS end
  local freed = 0
  for slot = oldest, newest or oldest - 1 do
    freed = freed + (tonumber(redis.call('HGET', scope.key, name .. whole(slot))) or 0)
    if freed >= much then return math.max((slot + slots + 1) * length - now, 0) end
  end
  return 0
end

-- Adds one request to the sums, in these slots.
local function add(scope, minute, day, tokens)
  local key = scope.key
  if minute >= scope.minute - MINUTES then
    redis.call('HINCRBY', key, 'R', 1)
    redis.call('HINCRBY', key, 'T', whole(tokens))
    redis.call('HINCRBY', key, 'r' .. whole(minute), 1)
    redis.call('HINCRBY', key, 't' .. whole(minute), whole(tokens))
    scope.mo, scope.mn = math.min(scope.mo, minute), math.max(scope.mn or minute, minute)
    scope.R, scope.T = scope.R + 1, scope.T + tokens
  end
  if day >= scope.day - DAYS then
    redis.call('HINCRBY', key, 'D', whole(tokens))
    redis.call('HINCRBY', key, 'd' .. whole(day), whole(tokens))
    scope['do'], scope.dn = math.min(scope['do'], day), math.max(scope.dn or day, day)
    scope.D = scope.D + tokens
  end
  if not scope.dn then return end
  -- A window without an entry of its own begins where the other does.
  scope.mn = scope.mn or scope.minute
  redis.call('HSET', key, 'mo', whole(scope.mo), 'mn', whole(scope.mn), 'do', whole(scope['do']), 'dn', whole(scope.dn))
  redis.call('PEXPIRE', key, KEPT_MS)
end

-- Takes a place among the running requests of a scope, until `until_ms`.
local function run(key, id, until_ms, now)
  redis.call('ZADD', key, whole(until_ms), id)
  redis.call('PEXPIRE', key, whole(math.max(until_ms - now, 1) + 60000))
end

-- The minute's slot, the quarter of an hour's, and the tokens of a reservation, by which it is settled.
local function note(key, minute, day, tokens, keep_ms)
  redis.call('SET', key, whole(minute) .. ' ' .. whole(day) .. ' ' .. whole(tokens), 'PX', whole(keep_ms))
end
