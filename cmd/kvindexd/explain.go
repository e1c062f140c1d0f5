package main

func sentencesFor(raw []byte, worker string, rank int) []string { return nil }
