-- A gateway leaves its record, and gets those of the others with their age.
-- KEYS: the hash of records. ARGV: holder, record, seconds until one is forgotten, the least step of a clock, '1' to
-- tell the others at once.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.3f:', now) .. ARGV[2])
local found, all = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local cut = string.find(all[i + 1], ':', 1, true)
  local age, record = now - tonumber(string.sub(all[i + 1], 1, cut - 1)), string.sub(all[i + 1], cut + 1)
  if age < -tonumber(ARGV[4]) then
    redis.call('HSET', KEYS[1], all[i], string.format('%.3f:', now) .. record)
  end
  if age > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], all[i])
  elseif all[i] ~= ARGV[1] then
    found[#found + 1] = {all[i], string.format('%.3f', math.max(age, 0)), record}
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
if ARGV[5] == '1' then redis.pcall('PUBLISH', KEYS[1], ARGV[1]) end
return found
