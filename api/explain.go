package api

func handleExplain(c *call) *Error { return nil }
