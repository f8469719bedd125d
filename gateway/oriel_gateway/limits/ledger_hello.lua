-- A gateway announces itself and counts the others.
-- KEYS: the hash of holders, the latest count of many. ARGV: holder, share, seconds of presence, seconds until it is forgotten, whole share,
-- seconds since it was heard last, the least step of a clock that counts as one.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local step, since, jump = tonumber(ARGV[7]), tonumber(ARGV[6]), 0
local function read(text)
  local cut = string.find(text, ':', 1, true)
  return tonumber(string.sub(text, 1, cut - 1)), string.sub(text, cut + 1)
end
local own = redis.call('HGET', KEYS[1], ARGV[1])
if own and since >= 0 then
  jump = now - read(own) - since
  if math.abs(jump) < step then jump = 0 end
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.3f:%.6f', now, ARGV[2]))
local known = own and jump == 0 and redis.call('GET', KEYS[2])
if known then return cjson.decode(known) end
local count, quiet, alone, all = 0, 0, 0, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local heard, share = read(all[i + 1])
  if all[i] ~= ARGV[1] and (jump ~= 0 or heard > now + step) then
    heard = math.min(heard + jump, now)
    redis.call('HSET', KEYS[1], all[i], string.format('%.3f:%s', heard, share))
  end
  local silent = now - heard
  if silent > tonumber(ARGV[4]) then
    redis.call('HDEL', KEYS[1], all[i])
  else
    count = count + 1
    if silent > tonumber(ARGV[3]) and tonumber(share) < tonumber(ARGV[5]) then
      quiet = quiet + 1
      alone = alone + tonumber(share)
    end
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[4])
local found = {count, quiet, string.format('%.6f', alone)}
-- each of N gateways would look at N holders each second
if count > 50 then redis.call('SET', KEYS[2], cjson.encode(found), 'PX', 100) end
return found
