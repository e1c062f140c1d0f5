package index

import (
	"syscall"
	"unsafe"
)

// askForHugePage asks the kernel to map the chunk at p, and what else of the heap
// shares its large pages, as such. Where transparent huge pages are off it
// changes nothing.
func askForHugePage(p unsafe.Pointer) {
	from := uintptr(p) &^ (chunkBytes - 1)
	size := uintptr(chunkBytes)
	if from != uintptr(p) {
		size *= 2
	}
	_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, from, size, syscall.MADV_HUGEPAGE)
}
