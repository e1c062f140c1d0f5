//go:build !linux

package index

import "unsafe"

func askForHugePage(unsafe.Pointer) {}
