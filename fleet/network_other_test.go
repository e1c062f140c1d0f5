//go:build !linux

package fleet

import "testing"

func partition(t *testing.T, _ bool) { t.Skip("network namespaces are Linux's") }
