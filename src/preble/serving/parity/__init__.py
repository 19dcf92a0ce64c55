"""Does a replica tokenize and cache as the scheduler predicts?"""
