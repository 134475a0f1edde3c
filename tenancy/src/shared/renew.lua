-- Renews the lease of a running request.
-- KEYS: as for its reservation. ARGV: id, lease in ms.

local id, lease = ARGV[1], tonumber(ARGV[2])
local noted = redis.call('GET', KEYS[1])
if not noted or noted == '' then return 0 end
local now = now_ms()
for at = 1, (#KEYS - 1) / 2 do run(KEYS[2 * at + 1], id, now + lease, now) end
return 1
