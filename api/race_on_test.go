//go:build race

package api

// raceEnabled: the race detector makes pools forget on purpose.
const raceEnabled = true
