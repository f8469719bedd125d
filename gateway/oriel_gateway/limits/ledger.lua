-- The lease protocol of oriel_policies/bounds/ledger.py, which explains it; keep the two alike. Redis 6.2 and later.
-- KEYS: the records of one tenant (one hash slot). ARGV: holder, lifetime of slots in us, then per key
-- kind, limit, step, need, want, debt, spent, number, born, used. Answers seven texts per key, in its order.
local FIELDS = 10
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local holder, ttl = ARGV[1], tonumber(ARGV[2])

local function text(value) return string.format('%.3f', value) end

-- Days since 1970 <-> civil date: H. Hinnant, "chrono-compatible low-level date algorithms".
local function month_of(days)
  local z = days + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  return year * 12 + month - 1
end
local function days_of(number)
  local year, month = math.floor(number / 12), number % 12 + 1
  if month <= 2 then year = year - 1 end
  local era = math.floor(year / 400)
  local yoe = year - era * 400
  local doy = math.floor((153 * (month > 2 and month - 3 or month + 9) + 2) / 5)
  return era * 146097 + yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + doy - 719468
end

local asks, fits = {}, true
for i, key in ipairs(KEYS) do
  local at = 2 + (i - 1) * FIELDS
  local ask = {key = key, kind = ARGV[at + 1]}
  for j, name in ipairs({'limit', 'step', 'need', 'want', 'debt', 'spent', 'number', 'born', 'used'}) do
    ask[name] = tonumber(ARGV[at + 1 + j])
  end
  if ask.kind == 'rate' then
    local full = ask.limit * ask.step
    local arrival = now
    local stored = redis.call('GET', key)
    if stored then
      local cut = string.find(stored, ':', 1, true)
      local written = tonumber(string.sub(stored, cut + 1))
      arrival = tonumber(string.sub(stored, 1, cut - 1))
      if now < written then arrival = arrival - (written - now) end
      if arrival < now then arrival = now end
    end
    if ask.spent ~= 0 then
      arrival = math.min(arrival + ask.spent * ask.step, math.max(arrival, now + full))
    end
    ask.arrival = math.max(arrival + ask.debt * ask.step, now)
    ask.free = (now + full - ask.arrival) / ask.step
  elseif ask.kind == 'slots' then
    local others, mine = 0, 0
    local all = redis.call('HGETALL', key)
    for j = 1, #all, 2 do
      local cut = string.find(all[j + 1], ':', 1, true)
      local slots, till = tonumber(string.sub(all[j + 1], 1, cut - 1)), tonumber(string.sub(all[j + 1], cut + 1))
      if till > now + 2 * ttl then
        redis.call('HSET', key, all[j], text(slots) .. ':' .. text(now + ttl))
      end
      if till <= now then
        redis.call('HDEL', key, all[j])
      elseif all[j] == holder then
        mine = slots
      else
        others = others + slots
      end
    end
    if ask.number >= 0 then mine = ask.used end
    ask.mine = math.max(0, mine + ask.debt)
    ask.free = ask.limit - others - ask.mine
  else
    local today = math.floor(now / 86400000000)
    local stored = redis.call('HMGET', key, 'number', 'born', 'used')
    local number, used = today, tonumber(stored[3] or '0')
    if ask.step ~= 0 then number = month_of(today) end
    if number > tonumber(stored[1] or '-1') then used = 0 end
    ask.seen, ask.is, ask.stamp = ask.number, number, tonumber(stored[2] or '0')
    if ask.stamp == 0 then ask.stamp = now end
    if ask.seen == number then
      if ask.born ~= ask.stamp then used = math.max(used, ask.used) end
      used = math.max(0, used + ask.debt)
    end
    ask.total = used
    ask.free = ask.limit - used
    local last = ask.step ~= 0 and days_of(number + 1) or today + 1
    ask.ends = last * 86400000000 - now
  end
  ask.least = math.min(ask.need, ask.limit)
  if ask.free + 1e-6 < ask.least then fits = false end
  asks[i] = ask
end

local answers = {}
for _, ask in ipairs(asks) do
  local granted = 0
  if fits then granted = math.max(ask.need, math.min(ask.want, math.floor(ask.free + 1e-6))) end
  local short = 0
  if ask.least > ask.free + 1e-6 then short = ask.least - ask.free end
  local wait, number, born, used, ends = 0, -1, 0, 0, 0
  if ask.kind == 'rate' then
    local arrival = ask.arrival + granted * ask.step
    wait = short * ask.step
    redis.call('SET', ask.key, text(arrival) .. ':' .. text(now),
      'PX', math.ceil(math.max(ask.limit * ask.step, arrival - now) / 1000) + 1000)
  elseif ask.kind == 'slots' then
    used = ask.mine + granted
    if short > 0 then wait = 1 end
    if used > 0 then
      redis.call('HSET', ask.key, holder, text(used) .. ':' .. text(now + ttl))
      redis.call('PEXPIRE', ask.key, math.ceil(ttl / 500))
    else
      redis.call('HDEL', ask.key, holder)
    end
  else
    used, number, born, ends = ask.total + granted, ask.is, ask.stamp, ask.ends
    if short > 0 then wait = ends end
    redis.call('HSET', ask.key, 'number', number, 'born', text(born), 'used', text(used),
      'period', ask.step ~= 0 and 'month' or 'day')
    redis.call('PEXPIRE', ask.key, math.ceil(ends / 1000) + 3600000)
  end
  for _, value in ipairs({granted, wait, ask.free - granted, number, born, used, ends}) do
    answers[#answers + 1] = text(value)
  end
end
return answers
