package fleet

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// island is a network namespace, joined to ours by one link.
type island struct {
	t    *testing.T
	name string
	addr string // its own on the link
}

// islands counts them, for names and addresses.
var islands atomic.Int32

// newIsland needs the right to make one.
func newIsland(t *testing.T) *island {
	t.Helper()
	n := islands.Add(1)
	id := fmt.Sprintf("%d%d", os.Getpid()%100_000, n)
	i := &island{t: t, name: "kvindexd-" + id, addr: fmt.Sprintf("169.254.%d.2", 10+n)}
	if out, err := exec.Command("ip", "netns", "add", i.name).CombinedOutput(); err != nil {
		t.Skipf("no network namespaces here: %v %s", err, out)
	}
	t.Cleanup(func() { i.ip("netns del " + i.name) })
	link := "kv" + id
	i.ip("link add " + link + " type veth peer name eth0 netns " + i.name)
	i.ip(fmt.Sprintf("addr add 169.254.%d.1/30 dev %s", 10+n, link))
	i.ip("link set " + link + " up")
	i.ip("-n " + i.name + " addr add " + i.addr + "/30 dev eth0")
	i.ip("-n " + i.name + " link set eth0 up")
	return i
}

func (i *island) ip(args string) {
	i.t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		i.t.Errorf("ip %s: %v %s", args, err, out)
	}
}

// cut stops (true) every packet to and from the island, without a word.
func (i *island) cut(on bool) {
	i.t.Helper()
	i.ip("-n " + i.name + " link set eth0 " + map[bool]string{true: "down", false: "up"}[on])
}

// within runs do on a thread in the island: what it opens stays there.
func (i *island) within(do func()) {
	i.t.Helper()
	var err error
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		var fd int
		if fd, err = unix.Open(filepath.Join("/run/netns", i.name), unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return
		}
		defer unix.Close(fd)
		if err = unix.Setns(fd, unix.CLONE_NEWNET); err == nil {
			do()
		}
	})
	wg.Wait()
	if err != nil {
		i.t.Fatal(err)
	}
}

// partition lets no packet through, in either direction, and tells nobody. It is
// noticed, and mended when it is over; a publisher that was replaced meanwhile is
// another one.
func partition(t *testing.T, restart bool) {
	i := newIsland(t)
	var a, b *engine
	i.within(func() { a = newHost(t, i.addr, nil) })
	spec := WorkerSpec{ID: "w", Model: "m", Endpoint: a.pub.Addr(), ReplayEndpoint: a.pub.ReplayAddr()}
	f := &faulty{a, running(t, Options{Timing: Timing{}.withDefaults(), Workers: []WorkerSpec{spec}})}
	a.churn(30)
	f.healed()
	i.cut(true)
	a.churn(20)
	if restart {
		a.kill()
		i.within(func() { b = newHost(t, i.addr, a) })
		b.takesOver(a)
		f.engine = b
		f.churn(60)
	}
	f.comes("cut off", cutOff)
	f.churn(20)
	i.cut(false)
	f.healed()
	t.Logf("%+v", countsOf(f.f, "w/0"))
}
