#!/bin/sh
# The system libraries that wheels cannot carry: OSMesa renders MuJoCo without a screen, OpenCV links GL and glib.
missing=""
have() { ldconfig -p 2>/dev/null | grep -q "$1" || [ -n "$(find /usr/lib /usr/local/lib -name "$1*" -print -quit 2>/dev/null)" ]; }
have libOSMesa.so.8 || missing="$missing libosmesa6"
have libGL.so.1 || missing="$missing libgl1"
have libglib-2.0.so.0 || missing="$missing libglib2.0-0"
[ -z "$missing" ] && exit 0
install="apt-get install -y --no-install-recommends$missing"
if command -v apt-get >/dev/null 2>&1; then
  if [ "$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo"; else sudo="no"; fi
  if [ "$sudo" != no ]; then
    echo "installing$missing"
    log=$(mktemp)
    ($sudo apt-get update && DEBIAN_FRONTEND=noninteractive $sudo $install) >"$log" 2>&1 && rm -f "$log" && exit 0
    tail -n 5 "$log" >&2
  fi
fi
echo "aura_ros: missing system packages:$missing. Type: sudo apt-get update && sudo $install" >&2
exit 1
