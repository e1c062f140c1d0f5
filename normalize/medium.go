package normalize

import "bytes"

// tierOf maps an event's medium, compared without case. No medium is the
// device; a medium that nobody knows is never a tier, least of all the device.
func tierOf(medium []byte) Tier {
	if len(medium) > maxMedium {
		return NoTier
	}
	var upper [maxMedium]byte
	switch string(appendUpper(upper[:0], medium)) {
	case "", "GPU", "DEVICE":
		return Device
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		return Host
	case "CPU_TIER2", "DISK", "NVME", "STORAGE", "FS", "OBJ":
		return Disk
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED":
		return External
	}
	return NoTier
}

// maxMedium bounds a medium's name, in bytes. The longest known has 10.
const maxMedium = 32

// appendUpper appends the ASCII upper case of s.
func appendUpper(dst, s []byte) []byte {
	for _, c := range s {
		if 'a' <= c && c <= 'z' {
			c -= 'a' - 'A'
		}
		dst = append(dst, c)
	}
	return dst
}

// isLocal says whether an event's locality is residency of its worker. A
// locality that nobody knows is not. An event's ownership is no part of it.
func isLocal(locality []byte) bool {
	return len(locality) == 0 || bytes.EqualFold(locality, []byte("LOCAL"))
}

// specOf maps a cache group's kind.
func specOf(kind []byte) SpecKind {
	switch string(kind) {
	case "":
		return SpecAbsent
	case "full_attention", "mla_attention", "sink_full_attention":
		return SpecFull
	case "sliding_window", "sliding_window_mla":
		return SpecWindow
	}
	return SpecOther
}

// String returns the tier's name in answers and metrics.
func (t Tier) String() string {
	switch t {
	case Device:
		return "device"
	case Host:
		return "host"
	case Disk:
		return "disk"
	case External:
		return "external"
	}
	return "none"
}
