#!/bin/bash
ls -lan /work/shared

chgrp -R 2000 /work/shared && chmod -R u=rwX,g=rwXs,o= /work/shared; ls -lan /work/shared

setfacl -R -m u:3000:rX -d -m g:2000:rwX,u:3000:rX,o::- /work/shared

getfacl -n /work/shared 2>/dev/null

umask 077; echo new > /work/shared/new; getfacl -n /work/shared/new 2>/dev/null
