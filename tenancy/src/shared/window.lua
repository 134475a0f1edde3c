-- The sums of one scope, as in `window.rs`: a hash with the number of requests and tokens of each second, the tokens of each quarter of an
-- hour (r<n>, t<n>, d<n>), their sums (R, T, D), and the oldest and the newest slot of each length; and the money that was spent in the
-- day and the month of the calendar (cd and cm are their numbers, cD and cM their sums). Times are the server's, in ms.

local MINUTE, MINUTES, DAY, DAYS = 1000, 60, 900000, 96
local KEPT_MS = (DAYS + 1) * DAY
local CALENDAR_DAY = 86400000
-- March of the year 0 to January 1970, in months, and to its first day, in days.
local EPOCH_MONTH, EPOCH_DAY = 23638, 719468

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The number of the month with a day, from January 1970 on; as H. Hinnant, "chrono-Compatible Low-Level Date Algorithms".
local function month_of(day)
  local of_era = (day + EPOCH_DAY) % 146097
  local era = math.floor((day + EPOCH_DAY) / 146097)
  local year = math.floor(
    (of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524) - math.floor(of_era / 146096)) / 365
  )
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  return (era * 400 + year) * 12 + math.floor((5 * of_year + 2) / 153) - EPOCH_MONTH
end

-- The time at which a month begins.
local function month_begins(month)
  local since = month + EPOCH_MONTH
  local year, of_year = math.floor(since / 12), math.floor((153 * (since % 12) + 2) / 5)
  local of_era = year % 400
  local days = of_era * 365 + math.floor(of_era / 4) - math.floor(of_era / 100) + of_year
  return (math.floor(year / 400) * 146097 + days - EPOCH_DAY) * CALENDAR_DAY
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
  local sums = redis.call('HMGET', key, 'R', 'T', 'D', 'cd', 'cD', 'cm', 'cM')
  scope.R, scope.T, scope.D = tonumber(sums[1]) or 0, tonumber(sums[2]) or 0, tonumber(sums[3]) or 0
  local today = math.floor(now / CALENDAR_DAY)
  local day, month = tonumber(sums[4]) or 0, tonumber(sums[6]) or 0
  scope.cd, scope.cm = math.max(today, day), math.max(month_of(today), month)
  scope.cD = day == scope.cd and tonumber(sums[5]) or 0
  scope.cM = month == scope.cm and tonumber(sums[7]) or 0
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
end

-- Adds money to what was spent in this day and this month, unless they are over.
local function spend(scope, day, month, micros)
  if micros == 0 then return end
  if day == scope.cd then scope.cD = scope.cD + micros end
  if month == scope.cm then scope.cM = scope.cM + micros end
  redis.call('HSET', scope.key, 'cd', whole(scope.cd), 'cD', whole(scope.cD), 'cm', whole(scope.cm), 'cM', whole(scope.cM))
end

-- Keeps a scope as long as anything of it counts.
local function keep(scope, now)
  local month = scope.cM > 0 and month_begins(scope.cm + 1) - now or 0
  redis.call('PEXPIRE', scope.key, whole(math.max(KEPT_MS, month)))
end

-- Takes a place among the running requests of a scope, until `until_ms`.
local function run(key, id, until_ms, now)
  redis.call('ZADD', key, whole(until_ms), id)
  redis.call('PEXPIRE', key, whole(math.max(until_ms - now, 1) + 60000))
end

-- The minute's slot, the quarter of an hour's, and the tokens of a reservation, and the day, the month and the money: by these it is
-- settled.
local function note(key, keep_ms, ...)
  local numbers = { ... }
  for at, number in ipairs(numbers) do numbers[at] = whole(number) end
  redis.call('SET', key, table.concat(numbers, ' '), 'PX', whole(keep_ms))
end
