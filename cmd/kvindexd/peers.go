package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
)

// peersFile keeps the peers within the state directory.
const peersFile = "peers.json"

// loadPeers adds the peers that were registered over HTTP to those of the
// command line.
func (o *serveOptions) loadPeers(log *slog.Logger) {
	if o.stateDir == "" {
		return
	}
	path := filepath.Join(o.stateDir, peersFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var kept []string
	if err == nil {
		err = json.Unmarshal(raw, &kept)
	}
	if err != nil {
		log.Error("registered peers lost", "file", path, "reason", err)
		return
	}
	for _, p := range kept {
		if !slices.Contains(o.peers, p) {
			o.peers = append(o.peers, p)
		}
	}
}

// keepPeers returns what is told the list of peers whenever it changes; nil
// keeps it in memory. The file is replaced whole.
func (o *serveOptions) keepPeers(log *slog.Logger) func([]string) {
	if o.stateDir == "" {
		return nil
	}
	path := filepath.Join(o.stateDir, peersFile)
	return func(peers []string) {
		raw, err := json.Marshal(peers)
		if err == nil {
			err = os.WriteFile(path+".new", append(raw, '\n'), 0o600)
		}
		if err == nil {
			err = os.Rename(path+".new", path)
		}
		if err != nil {
			log.Error("peers not kept", "file", path, "reason", err)
		}
	}
}
