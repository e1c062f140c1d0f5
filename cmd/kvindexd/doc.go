// Command kvindexd follows the KV-cache events of vLLM workers and answers which
// worker holds how much of a prompt.
//
// One file is one command. A command reads its flags, calls the packages and
// prints; what decides anything about events, identities or residency lives in
// zmqwire, normalize, index, fleet, store and api. The exceptions are tools of
// the command line itself: sim.go, a simulated engine for publish and demo,
// republish.go, which turns a capture back into publishers, and check.go, which
// compares answers with known ones.
package main
