#!/bin/bash
cat /work/tick

cat > /work/loop <<'END'
#!/bin/bash
while [ "$(wc -l < /work/ticks)" -lt 5 ]; do
    flock -n /work/lock bash /work/tick
    sleep 0.5
done
touch /work/finished
END
touch /work/ticks; chmod +x /work/loop

(setsid /work/loop >/dev/null 2>&1 </dev/null &); sleep 1; head -n 1 /work/ticks

until [ -e /work/finished ]; do sleep 0.1; done; wc -l < /work/ticks

pgrep -f /work/loop | wc -l
