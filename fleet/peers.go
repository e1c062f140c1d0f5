package fleet

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"
)

// PeerOptions are the patience with replicas that are asked for their dump.
type PeerOptions struct {
	// Token is sent as bearer token, where it is set.
	Token string
	// Connect bounds the wait for a peer's answer to begin, 2 s; Silence the
	// wait for its next line, 5 s; Budget all of it, over all peers, 30 s.
	Connect, Silence, Budget time.Duration
	// MaxBytes bounds a dump, 8 GiB.
	MaxBytes int64
}

func (o PeerOptions) withDefaults() PeerOptions {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&o.Connect, 2*time.Second)
	def(&o.Silence, 5*time.Second)
	def(&o.Budget, 30*time.Second)
	if o.MaxBytes <= 0 {
		o.MaxBytes = 8 << 30
	}
	return o
}

// errEmptyPeer: it answers, and has nothing.
var errEmptyPeer = errors.New("the peer holds nothing")

// askPeers returns the dump of the first peer that has one; nil: none has, or
// none answers in time.
func (s *Snapshots) askPeers(ctx context.Context) *recovery {
	ctx, cancel := context.WithTimeoutCause(ctx, s.o.Peer.Budget, errors.New("the time for all peers is over"))
	defer cancel()
	for _, peer := range s.o.Peers {
		start := time.Now()
		r, err := askPeer(ctx, peer, s.o.Peer)
		if err == nil {
			s.log.Info("peer's dump loaded", "peer", peer, "streams", r.left, "blocks", r.blocks(), "took", time.Since(start).Round(time.Millisecond))
			return r
		}
		s.m.peerFailed.Add(1)
		s.log.Warn("peer gives nothing", "peer", peer, "reason", err)
	}
	return nil
}

// askPeer reads a peer's whole dump.
func askPeer(ctx context.Context, peer string, o PeerOptions) (*recovery, error) {
	at, err := url.JoinPath(peer, "/v1/dump")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	patience := time.AfterFunc(2*o.Connect, func() { cancel(errors.New("no answer in time")) })
	defer patience.Stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, err
	}
	if o.Token != "" {
		req.Header.Set("Authorization", "Bearer "+o.Token)
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: o.Connect}).DialContext,
		TLSHandshakeTimeout: o.Connect, ResponseHeaderTimeout: o.Connect, DisableKeepAlives: true,
	}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return nil, because(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("it answers %s", resp.Status)
	}
	r, err := readDump(peer, io.LimitReader(resp.Body, o.MaxBytes), func() { patience.Reset(o.Silence) })
	if err != nil {
		return nil, because(ctx, err)
	}
	if r.left == 0 {
		return nil, errEmptyPeer
	}
	return r, nil
}

// because is err, or why the context ended.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// maxLine bounds one line of a dump: a chunk in base64, and something around it.
const maxLine = 2 << 20

// readDump reads JSON lines to the end line. heard is called for each.
func readDump(from string, in io.Reader, heard func()) (*recovery, error) {
	r := newRecovery(from)
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	streams, begun := 0, false
	for lines.Scan() {
		heard()
		var l line
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return nil, badContent("%w", err)
		}
		if !begun && l.Format == nil {
			return nil, badContent("it does not begin with its format")
		}
		begun = true
		if l.Stream != nil {
			streams++
		}
		if l.End != nil {
			if l.End.Streams != streams || l.End.Sets != len(r.sets) {
				return nil, badContent("%d streams in %d sets, should be %d in %d", streams, len(r.sets), l.End.Streams, l.End.Sets)
			}
			return r, r.closeSet()
		}
		if err := r.line(&l); err != nil {
			return nil, err
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	return nil, badContent("cut short")
}
