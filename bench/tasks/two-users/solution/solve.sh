#!/bin/bash
id -u; ls -lan /work

mkdir -p /work/inbox && chown 1001:1001 /work/inbox && chmod 1733 /work/inbox; stat -c '%u %a' /work/inbox

setpriv --reuid 1002 --regid 1002 --clear-groups sh -c 'umask 077; echo from 1002 > /work/inbox/letter; ls /work/inbox'

setpriv --reuid 1001 --regid 1001 --clear-groups sh -c 'ls /work/inbox; cat /work/inbox/letter'

setpriv --reuid 1001 --regid 1001 --clear-groups sh -c 'umask 077; echo own > /work/inbox/own; cat /work/inbox/own'
