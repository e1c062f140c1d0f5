package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvindexd/kvindexd/api"
	"github.com/kvindexd/kvindexd/fleet"
	"github.com/kvindexd/kvindexd/index"
)

// defaultListen is where serve listens and where the client commands ask.
const defaultListen = "127.0.0.1:8099"

// serveOptions are the flags of serve.
type serveOptions struct {
	settings string

	workers, models, dns         []string
	config, endpoints            string
	endpointsModel               string
	eventPortBase, replayPort    int
	allow                        []string
	stateDir                     string
	maxIndex                     byteSize
	maxReplays                   int
	timing                       fleet.Timing
	listen                       string
	tokenFile, readTokenFile     string
	tlsCert, tlsKey, tlsClientCA string
	insecure                     bool
	maxBody, maxBodies           byteSize
	snapshotDir, peerTokenFile   string
	snapshotInterval             time.Duration
	peers                        []string
	api                          api.Config
}

func newServe() *cobra.Command {
	o := serveOptions{maxBody: 16 << 20, maxBodies: 256 << 20}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon: subscribe to workers, answer over HTTP",
		Long: `serve subscribes to the event publishers of vLLM workers and answers questions
over HTTP until SIGTERM or SIGINT; then it lets the requests in flight end and
exits with code 0. With --state-dir it writes snapshots of its index, at the end too,
and begins from the last one: its streams are then confirmed by their publishers.

Workers come from any of these, all at once: --worker, --config FILE (watched;
YAML or JSON with models, workers and dns), --endpoints-file FILE (the endpoints
file of an llm-d router, watched), --dns (a headless service), and registration
over HTTP (PUT /v1/workers/{id}, POST /register; kept across restarts with
--state-dir).

An entry on the command line is key=value pairs with commas between them; the
keys are those of the file: id, model, endpoint, replay_endpoint, topic,
dp_size, rank_index, namespace, role, image_token_id, video_token_id, model_dir,
exact_mm, extra_keys, eagle_drop, on_gap, block_size, tower_connector_lora, bind,
loras (separated by |).

It listens on loopback unless told otherwise. Another address needs
--auth-token-file or --tls-client-ca, or --insecure.

--settings FILE holds flags as a mapping; the environment and the command line
win over it.`,
		Example: `  kvindexd serve --worker id=vllm-0,model=Qwen/Qwen3-8B,endpoint=tcp://10.0.0.5:5557,replay_endpoint=tcp://10.0.0.5:5657
  kvindexd serve --config workers.yaml --listen 0.0.0.0:8099 --auth-token-file /run/secrets/kvindexd
  kvindexd serve --dns dns=vllm.prod.svc,port=5557,replay_port=5657,model=Qwen/Qwen3-8B
  KVINDEXD_CONFIG=/etc/kvindexd/workers.yaml KVINDEXD_LOG_FORMAT=json kvindexd serve`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.settings != "" {
				if err := fromFile(cmd.Flags(), o.settings); err != nil {
					return err
				}
			}
			return runServe(cmd, &o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.settings, "settings", "", "file of flags: a mapping, YAML or JSON")
	o.fleetFlags(f)
	o.apiFlags(f)
	return cmd
}

func (o *serveOptions) fleetFlags(f *pflag.FlagSet) {
	f.StringArrayVar(&o.workers, "worker", nil, "a worker, as id=…,model=…,endpoint=…[,key=value…] (repeated)")
	f.StringArrayVar(&o.models, "model", nil, "what the workers of a model share, as name=…[,key=value…] (repeated)")
	f.StringArrayVar(&o.dns, "dns", nil, "a headless service whose addresses are workers, as dns=…,port=…,model=…[,key=value…] (repeated)")
	f.StringVar(&o.config, "config", "", "file of models, workers and dns names; watched")
	f.StringVar(&o.endpoints, "endpoints-file", "", "endpoints file of an llm-d router; watched")
	f.StringVar(&o.endpointsModel, "endpoints-model", "", "model of the router's endpoints that have no label for it")
	f.IntVar(&o.eventPortBase, "event-port-base", 5557, "event port of a router's endpoint of rankIndex 0")
	f.IntVar(&o.replayPort, "replay-port-base", 0, "replay port of a router's endpoint of rankIndex 0, 0 for none")
	f.StringArrayVar(&o.allow, "allow-endpoint", nil, "what a registration over HTTP may make the daemon dial: CIDR, address, host suffix or ipc://PREFIX (repeated; default: private and loopback addresses)")
	f.StringVar(&o.stateDir, "state-dir", "", "directory that keeps registrations and snapshots across restarts")
	f.StringVar(&o.snapshotDir, "snapshot-dir", "", "directory of snapshots alone, or none (default: snapshots within --state-dir)")
	f.DurationVar(&o.snapshotInterval, "snapshot-interval", 5*time.Minute, "time between two snapshots; negative: only at the end and on demand")
	f.Var(&o.maxIndex, "max-index-bytes", "byte budget of the index, all worker sets together, such as 2GiB; 0 for none")
	f.IntVar(&o.maxReplays, "max-replays", 8, "replays that run at once")
	f.DurationVar(&o.timing.DisconnectGrace, "disconnect-grace", 10*time.Second, "how long a connection may be down before its stream says so")
	f.DurationVar(&o.timing.ForgetAfter, "forget-after", 10*time.Minute, "how long the entries of a disconnected stream stay")
	f.DurationVar(&o.timing.RestoreGrace, "restore-grace", time.Minute, "how long a restored stream may wait to be confirmed")
	f.DurationVar(&o.timing.IdleProbe, "idle-probe", 2*time.Second, "silence after which a replay endpoint is asked for a lost last batch")
	f.DurationVar(&o.timing.Resolve, "dns-interval", 10*time.Second, "how often names are looked up")
}

func (o *serveOptions) apiFlags(f *pflag.FlagSet) {
	f.StringVar(&o.listen, "listen", defaultListen, "address to answer on")
	f.StringVar(&o.tokenFile, "auth-token-file", "", "file of bearer tokens, one a line, that may read and change the fleet")
	f.StringVar(&o.readTokenFile, "auth-read-token-file", "", "file of bearer tokens that may only read")
	f.StringVar(&o.tlsCert, "tls-cert", "", "certificate file; read again when it changes")
	f.StringVar(&o.tlsKey, "tls-key", "", "key file of --tls-cert")
	f.StringVar(&o.tlsClientCA, "tls-client-ca", "", "file of authorities; clients then need a certificate of theirs")
	f.BoolVar(&o.insecure, "insecure", false, "listen beyond loopback without tokens or client certificates")
	f.Var(&o.maxBody, "max-body", "most bytes of one body")
	f.Var(&o.maxBodies, "max-bodies", "most bytes of memory of all bodies in flight")
	f.IntVar(&o.api.MaxConcurrent, "max-concurrent", 256, "requests answered at once; more get 429")
	f.DurationVar(&o.api.DrainDelay, "drain-delay", 0, "how long /readyz says that the end is near, on SIGTERM, before the listener closes")
	f.IntVar(&o.api.MaxConnections, "max-connections", 4096, "open connections; one more ends the one idle longest")
	f.IntVar(&o.api.MinWorkers, "min-workers", 0, "workers that must be followed for /readyz to say ready")
	f.DurationVar(&o.api.HeaderTimeout, "header-timeout", 5*time.Second, "patience for a request's headers")
	f.DurationVar(&o.api.BodyTimeout, "body-timeout", 30*time.Second, "patience for a request's body")
	f.DurationVar(&o.api.IdleTimeout, "idle-timeout", 2*time.Minute, "patience between two requests of a connection")
	f.DurationVar(&o.api.WriteTimeout, "write-timeout", time.Minute, "patience for a reader of an answer")
	f.StringArrayVar(&o.peers, "peer", nil, "base URL of another replica, to recover from at the start (repeated)")
	f.StringVar(&o.peerTokenFile, "peer-token-file", "", "file with the bearer token to send to peers")
}

// fleetOptions reads the flags about workers.
func (o *serveOptions) fleetOptions(log *slog.Logger) (fleet.Options, error) {
	fo := fleet.Options{
		Logger: log, Timing: o.timing, ConfigFile: o.config, EndpointsFile: o.endpoints,
		EndpointsModel: o.endpointsModel, EventPortBase: o.eventPortBase, ReplayPortBase: o.replayPort,
		StateDir: o.stateDir, MaxReplays: o.maxReplays,
	}
	if o.maxIndex > 0 {
		fo.Index.Budget = index.NewBudget(int64(o.maxIndex))
	}
	var err error
	if fo.Workers, err = parseWorkers(o.workers); err != nil {
		return fo, err
	}
	if fo.Models, err = parseModels(o.models); err != nil {
		return fo, err
	}
	if fo.DNS, err = parseDNS(o.dns); err != nil {
		return fo, err
	}
	if fo.Allow, err = fleet.ParseAllowList(o.allow); err != nil {
		return fo, usagef("--allow-endpoint: %w", err)
	}
	return fo, nil
}

// snapshotOptions reads the flags about coming back warm.
func (o *serveOptions) snapshotOptions(log *slog.Logger) (fleet.SnapshotOptions, error) {
	so := fleet.SnapshotOptions{
		Logger: log, Dir: o.snapshotDir, Interval: o.snapshotInterval, Keep: o.timing.RestoreGrace,
		Producer: "kvindexd " + versionText(), Peers: o.peers,
	}
	switch {
	case o.snapshotDir == "none":
		so.Dir = ""
	case o.snapshotDir == "" && o.stateDir != "":
		so.Dir = filepath.Join(o.stateDir, "snapshots")
	}
	if o.peerTokenFile != "" {
		raw, err := os.ReadFile(o.peerTokenFile)
		if err != nil {
			return so, usagef("--peer-token-file: %w", err)
		}
		so.Peer.Token = firstToken(string(raw))
	}
	return so, nil
}

// apiConfig reads the flags about answering.
func (o *serveOptions) apiConfig(log *slog.Logger) (api.Config, error) {
	c := o.api
	c.Logger, c.Version, c.Peers, c.PeersChanged = log, versionText(), o.peers, o.keepPeers(log)
	c.MaxBody, c.MaxBodies = int64(o.maxBody), int64(o.maxBodies)
	var err error
	if o.tokenFile != "" {
		if c.ChangeTokens, err = api.LoadTokens(o.tokenFile); err != nil {
			return c, usagef("--auth-token-file: %w", err)
		}
	}
	if o.readTokenFile != "" {
		if c.ReadTokens, err = api.LoadTokens(o.readTokenFile); err != nil {
			return c, usagef("--auth-read-token-file: %w", err)
		}
	}
	guarded := o.tokenFile != "" || o.readTokenFile != "" || o.tlsClientCA != ""
	if err := api.CheckListen(o.listen, guarded, o.insecure); err != nil {
		return c, usagef("--listen: %w", err)
	}
	return c, nil
}

// listener opens the address, with TLS where it is configured.
func (o *serveOptions) listener() (net.Listener, error) {
	var secure *tls.Config
	if o.tlsCert != "" || o.tlsKey != "" || o.tlsClientCA != "" {
		var err error
		if secure, err = api.TLSConfig(o.tlsCert, o.tlsKey, o.tlsClientCA); err != nil {
			return nil, usageError{err}
		}
	}
	l, err := net.Listen("tcp", o.listen)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("%s is in use: is another kvindexd running? --listen takes another address: %w", o.listen, err)
	}
	if err != nil {
		return nil, err
	}
	if secure != nil {
		l = tls.NewListener(l, secure)
	}
	return l, nil
}

func runServe(cmd *cobra.Command, o *serveOptions) error {
	log, err := loggerOf(cmd, slog.LevelInfo)
	if err != nil {
		return err
	}
	o.loadPeers(log)
	fo, err := o.fleetOptions(log)
	if err != nil {
		return err
	}
	so, err := o.snapshotOptions(log)
	if err != nil {
		return err
	}
	ac, err := o.apiConfig(log)
	if err != nil {
		return err
	}
	l, err := o.listener()
	if err != nil {
		return err
	}
	defer l.Close() // for the ways out before it serves
	d := &daemon{log: log, listener: l}
	if err := d.assemble(cmd.Context(), fo, so, ac); err != nil {
		return err
	}
	return d.run(cmd.Context())
}

// daemon is the parts of serve that run.
type daemon struct {
	log       *slog.Logger
	snapshots *fleet.Snapshots // nil keeps none
	fleet     *fleet.Fleet
	server    *api.Server
	listener  net.Listener
}

// assemble makes the parts. What a snapshot or a peer has is read before the
// fleet is made, and goes to its streams when they begin.
func (d *daemon) assemble(ctx context.Context, fo fleet.Options, so fleet.SnapshotOptions, ac api.Config) (err error) {
	if d.snapshots, err = fleet.OpenSnapshots(ctx, so); err != nil {
		return snapshotError(so.Dir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.snapshots.Close(ctx, nil))
		}
	}()
	fo.Restore = d.snapshots.Restore
	d.fleet, err = fleet.New(fo)
	if errors.Is(err, fleet.ErrInvalid) {
		return usageError{err}
	}
	if err != nil {
		return err
	}
	// A file may be mended while the daemon runs; the command line cannot.
	for _, p := range d.fleet.Problems() {
		if p.Source == "flags" {
			return usageError{p.Err}
		}
	}
	ac.Fleet, ac.Snapshots = d.fleet, d.snapshots
	d.server, err = api.NewServer(ac)
	return err
}

// snapshotPatience bounds the snapshot at the end.
const snapshotPatience = 20 * time.Second

// run serves until ctx ends, then lets what is in flight come to its end, writes
// a last snapshot, and ends the subscriptions.
func (d *daemon) run(ctx context.Context) error {
	signal.Ignore(syscall.SIGHUP) // files are watched, a reload needs no signal
	d.log.Info("listening", "address", d.listener.Addr().String(), "version", versionText(), "pid", os.Getpid())
	if d.fleet.Ready().Workers == 0 {
		d.log.Info("no worker yet", "hint", "--worker, --config, --dns, or register one over HTTP")
	}
	follow := d.start(ctx, d.fleet.Run)
	keep := d.start(ctx, func(ctx context.Context) error {
		if d.snapshots != nil {
			d.snapshots.Run(ctx, d.fleet)
		}
		return nil
	})
	err := d.server.Serve(ctx, d.listener)
	if err == nil {
		d.log.Info("stopping", "reason", context.Cause(ctx))
	}
	err = errors.Join(err, keep(), d.lastSnapshot(ctx), follow())
	d.log.Info("stopped")
	return err
}

// start runs a part that outlives the daemon's context, and returns what ends
// it.
func (d *daemon) start(ctx context.Context, part func(context.Context) error) (stop func() error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- part(ctx) }()
	return func() error {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	}
}

// lastSnapshot writes what the fleet, which still runs, holds at the end.
func (d *daemon) lastSnapshot(ctx context.Context) error {
	if d.snapshots == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), snapshotPatience)
	defer cancel()
	return d.snapshots.Close(ctx, d.fleet)
}
