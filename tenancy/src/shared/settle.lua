-- Corrects a reservation to what was used, or takes it back as if it had never been. A second call does nothing.
-- KEYS: as for the reservation. ARGV: id, tokens and money used, 1 if the request is gone, time in ms for which a reservation that has not
-- come yet is refused.

local id, used, spent, gone, refused_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local noted = redis.call('GET', KEYS[1])
if noted == '' then return 0 end
redis.call('SET', KEYS[1], '', 'PX', refused_ms)
for at = 1, (#KEYS - 1) / 2 do redis.call('ZREM', KEYS[2 * at + 1], id) end
if not noted then return 0 end

local minute, quarter, tokens, day, month, micros = string.match(noted, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
local change, price = used - tonumber(tokens), spent - tonumber(micros)
for at = 1, (#KEYS - 1) / 2 do
  local key = KEYS[2 * at]
  -- A slot that no longer counts is not there any more.
  if redis.call('HEXISTS', key, 'r' .. minute) == 1 then
    redis.call('HINCRBY', key, 'T', whole(change))
    redis.call('HINCRBY', key, 't' .. minute, whole(change))
    redis.call('HINCRBY', key, 'R', 0 - gone)
    redis.call('HINCRBY', key, 'r' .. minute, 0 - gone)
  end
  if redis.call('HEXISTS', key, 'd' .. quarter) == 1 then
    redis.call('HINCRBY', key, 'D', whole(change))
    redis.call('HINCRBY', key, 'd' .. quarter, whole(change))
  end
  -- What was spent before this day or this month is over, too.
  if price ~= 0 and redis.call('HGET', key, 'cd') == day then redis.call('HINCRBY', key, 'cD', whole(price)) end
  if price ~= 0 and redis.call('HGET', key, 'cm') == month then redis.call('HINCRBY', key, 'cM', whole(price)) end
end
return 1
