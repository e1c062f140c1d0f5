package api

import (
	"container/list"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
)

// connections bounds how many are open. One too many ends the one that has
// been idle longest, so that a crowd of idle or slow connections ends itself
// and not those who ask; where all are being answered, the new one goes.
type connections struct {
	max int

	mu sync.Mutex
	// order has every open connection, the longest idle at the front, but for
	// those that are being answered.
	order list.List
	at    map[net.Conn]*list.Element
}

type connection struct {
	conn   net.Conn
	active bool
}

// state is the server's ConnState hook. A connection counts as idle until the
// headers of a request are there.
func (c *connections) state(conn net.Conn, s http.ConnState) {
	switch s {
	case http.StateNew:
		if last := c.open(conn); last != nil {
			closeNow(last)
		}
	case http.StateActive, http.StateIdle:
		c.mu.Lock()
		defer c.mu.Unlock()
		if e := c.at[conn]; e != nil {
			e.Value.(*connection).active = s == http.StateActive
			c.order.MoveToBack(e)
		}
	default:
		c.mu.Lock()
		defer c.mu.Unlock()
		if e := c.at[conn]; e != nil {
			c.order.Remove(e)
			delete(c.at, conn)
		}
	}
}

// open takes a connection in and returns the one that has to go for it.
func (c *connections) open(conn net.Conn) net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at == nil {
		c.at = map[net.Conn]*list.Element{}
	}
	c.at[conn] = c.order.PushBack(&connection{conn: conn})
	if len(c.at) <= c.max {
		return nil
	}
	for e := c.order.Front(); e != nil; e = e.Next() {
		if v := e.Value.(*connection); !v.active {
			c.order.Remove(e)
			delete(c.at, v.conn)
			return v.conn
		}
	}
	return nil
}

// closeNow ends a connection without a word: TLS would wait for the peer to
// take its last one.
func closeNow(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	c.Close()
}
